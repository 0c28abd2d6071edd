"""The workload is the same everywhere, has the shares it says, and each program ends as it should in a plain interpreter."""

import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from loadtest.bench.agent import last_line, run_command
from loadtest.support.workload import MIXES, STATUS_OF_KIND, TEMPLATES, Program, Template, Workload, calls, deal, shares
from worker.config import default_packages
from worker.sandbox import interpreter

# Three times as many templates as the usual workloads of the field have.
TEMPLATES_AT_LEAST = {"std": 21, "sympy": 15, "numpy": 6, "scipy": 3, "error": 15, "endless": 3}
DRAWS = 3


@pytest.mark.parametrize("mix", MIXES)
def test_same_seed_gives_the_same_programs(mix: str) -> None:
    assert calls(200, 7, mix) == calls(200, 7, mix)
    assert calls(200, 7, mix) != calls(200, 8, mix)


def test_programs_do_not_depend_on_the_hash_seed() -> None:
    code = "from loadtest.support.workload import calls\nprint(calls(300, 3, 'slow'))"

    def printed(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout

    assert printed("1") == printed("2")


@pytest.mark.parametrize("mix", MIXES)
def test_kinds_have_exactly_their_weights(mix: str) -> None:
    counts = Counter(program.kind for program in calls(1000, 1, mix))
    total = sum(MIXES[mix].values())
    assert counts == {kind: 1000 * weight // total for kind, weight in MIXES[mix].items()}


def test_shares_add_up_when_they_do_not_divide() -> None:
    assert shares(7, {"a": 1, "b": 1, "c": 1}) == {"a": 3, "b": 2, "c": 2}
    assert sum(shares(33, MIXES["slow"]).values()) == 33


@pytest.mark.parametrize(("kind", "least"), TEMPLATES_AT_LEAST.items())
def test_there_is_variety(kind: str, least: int) -> None:
    names = [template.name for template in TEMPLATES[kind]]
    assert len(set(names)) == len(names) >= least


def test_parts_have_the_same_composition() -> None:
    parts = deal(calls(300, 1, "rollout"), 5, seed=1)
    kinds = [Counter(program.kind for program in part) for part in parts]
    assert all(one == kinds[0] for one in kinds)
    assert sorted(map(repr, chain.from_iterable(parts))) == sorted(map(repr, calls(300, 1, "rollout")))


def test_another_module_can_bring_the_programs(tmp_path: Path) -> None:
    module = tmp_path / "other.py"
    module.write_text(
        "def calls(n, seed=0, mix='x'):\n"
        "    return [{'kind': 'endless' if i else mix, 'code': f'print({seed})', 'stdin': 'in'} for i in range(n)]\n"
    )
    workload = Workload.from_file(module)
    first, second = workload.calls(2, 5, "std")
    assert first == Program("std", "print(5)", "in")
    assert second.wall_s < first.wall_s
    assert str(tmp_path) not in workload.name


def plain_outcome(program: Program, folder: Path, hash_seed: str) -> tuple[str, str, str]:
    folder.mkdir(parents=True)
    (folder / "main.py").write_text(program.code)
    environment = {"PYTHONPATH": default_packages(), "PYTHONHASHSEED": hash_seed, "OPENBLAS_NUM_THREADS": "1"}
    status, stdout, stderr = run_command([interpreter.own().path, "main.py"], program, environment, folder)
    return status, stdout, last_line(stderr)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in ("sympy", "scipy") else kind for kind in TEMPLATES]
)
def test_every_program_ends_as_expected_and_the_same_under_another_hash_seed(kind: str, tmp_path: Path) -> None:
    if not Path(default_packages()).is_dir():
        pytest.fail("the packages for programs are missing: run `make install`")

    def problem_of(template: Template) -> str:
        program = Program(kind, *template.fill(random.Random(template.name)), wall_s=1.0 if kind == "endless" else 60.0)
        first, second = (plain_outcome(program, tmp_path / template.name / seed, seed) for seed in ("1", "2"))
        if first != second:
            return f"{template.name}: {first} and {second}"
        return "" if first[0] == STATUS_OF_KIND.get(kind, "ok") else f"{template.name} ended with {first}"

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        assert [problem for problem in threads.map(problem_of, TEMPLATES[kind]) if problem] == []


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_draw_of_a_template_is_a_program_that_compiles(kind: str) -> None:
    for template in TEMPLATES[kind]:
        for seed in range(DRAWS):
            code, _ = template.fill(random.Random(seed))
            assert "$" not in code
            if kind != "error":
                compile(code, template.name, "exec")
