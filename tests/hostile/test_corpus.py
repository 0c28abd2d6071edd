"""Every hostile program once; a few of them as copies beside a canary. All of them alone and as copies: `make hostile`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from cage import Cage, caged
from corpus import BadHeader, Program, judge, load, parse
from sandbox_harness import need_sandbox

from exec_wire import Result, Sandbox, Usage, verdict
from worker.sandbox.tiers import ALL_LAYERS

PROGRAMS = load()
PARTNERS = {name for program in PROGRAMS.values() for name in (program.pair, program.after) if name}
ON_THEIR_OWN = [name for name in PROGRAMS if name not in PARTNERS]
SLOTS = 4  # on two cores; more would only wait for each other
IN_A_CROWD = [
    "b_015_fork_bomb.py",
    "c_028_list_of_bytearrays.py",
    "f_074_files_of_an_earlier_call.py",
    "k_109_children_of_the_zygote.py",
]
End = tuple[list[str], Result]  # what is wrong, and the result
Ends = dict[str, asyncio.Task[End]]
TIER_A = Sandbox("A", list(ALL_LAYERS))


@pytest.fixture(scope="module")
async def cage() -> AsyncIterator[Cage]:
    need_sandbox()
    async with caged(PROGRAMS, SLOTS, []) as cage:
        yield cage


@contextlib.asynccontextmanager
async def started(
    request: pytest.FixtureRequest, parameter: str, cage: Cage, run: Callable[[str], Coroutine[Any, Any, End]]
) -> AsyncIterator[Ends]:
    """Every program that a chosen test has as this parameter, begun; what has not ended in the end is given up."""
    params = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {spec.params[parameter] for spec in params if spec is not None and parameter in spec.params}
    tasks = {name: asyncio.create_task(run(name)) for name in wanted if not cage.lacking(PROGRAMS[name])}
    yield tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


@pytest.fixture(scope="module")
async def ends(cage: Cage, request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    """All programs that were chosen, started at once and run as slots become free: a third of the time it takes one by one."""
    async with started(request, "alone", cage, lambda name: cage.run_alone(PROGRAMS[name], crowd=True)) as tasks:
        yield tasks


@pytest.mark.parametrize("alone", ON_THEIR_OWN)
async def test_program_ends_as_expected(cage: Cage, ends: Ends, alone: str) -> None:
    if reason := cage.lacking(PROGRAMS[alone]):
        pytest.skip(reason)
    wrong, _ = await ends[alone]
    assert wrong == []


@pytest.mark.parametrize("name", IN_A_CROWD)
async def test_copies_end_as_expected_and_leave_nothing(cage: Cage, name: str) -> None:
    before = await cage.look_at_rest()
    wrong, _ = await cage.run_crowd(PROGRAMS[name])
    assert wrong == []
    assert await cage.differences(before) == []
    assert await cage.leftovers() == []
    assert cage.canary.wrong == []


CELLS = [name for name in ON_THEIR_OWN if PROGRAMS[name].language == "python" and not PROGRAMS[name].not_as_cell]


@pytest.fixture(scope="module")
async def cells_cage() -> AsyncIterator[Cage]:
    need_sandbox()
    async with caged(PROGRAMS, SLOTS, []) as cage:
        cage.lend_slots()
        yield cage


@pytest.fixture(scope="module")
async def cells(cells_cage: Cage, request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    """As `ends`, a few at a time: each has a session of its own."""
    room = asyncio.Semaphore(SLOTS)

    async def run(name: str) -> End:
        async with room:
            return await cells_cage.run_cell(PROGRAMS[name], crowd=True)

    async with started(request, "cell", cells_cage, run) as tasks:
        yield tasks


@pytest.mark.parametrize("cell", CELLS)
async def test_cell_ends_as_expected(cells_cage: Cage, cells: Ends, cell: str) -> None:
    if reason := cells_cage.lacking(PROGRAMS[cell]):
        pytest.skip(reason)
    wrong, _ = await cells[cell]
    assert wrong == []


async def test_copies_of_a_cell_end_as_expected_and_harm_no_other_session(cells_cage: Cage) -> None:
    wrong, _ = await cells_cage.run_cells_crowd(PROGRAMS["b_015_fork_bomb.py"])
    assert wrong == []
    assert cells_cage.canary.wrong == []
    assert await cells_cage.look_in_session() == []


async def test_hostile_cells_leave_nothing(cells_cage: Cage) -> None:
    before = await cells_cage.look_at_rest()
    for name in (
        "b_015_fork_bomb.py",
        "b_017_daemon_with_stdout.py",
        "c_031_memory_files.py",
        "k_109_children_of_the_zygote.py",
    ):
        await cells_cage.run_cell(PROGRAMS[name])
    assert await cells_cage.differences(before) == []


def test_every_program_of_the_design_is_there() -> None:
    assert {program.number for program in PROGRAMS.values()} >= set(range(1, 109))
    first_of_group = {"A": 1, "B": 15, "C": 28, "D": 45, "E": 55, "F": 67, "G": 80, "H": 97, "I": 102, "K": 109}
    for program in PROGRAMS.values():
        assert program.group == max((g for g, first in first_of_group.items() if first <= program.number)), program.name


def write(folder: Path, header: str, name: str = "a_001_x.py") -> Path:
    path = folder / name
    path.write_text(header)
    return path


def made(folder: Path, expect: str, **fields: object) -> Program:
    return parse(write(folder, f"# A 1: x\n# expect: {expect}\n" + "".join(f"# {k}: {v}\n" for k, v in fields.items())))


@pytest.mark.parametrize(
    "header",
    [
        "print(1)",
        "# A 2: the number is another\n# expect: status=ok",
        "# A 1: nothing is expected",
        "# A 1: x\n# expect: status=fine",
        "# A 1: x\n# expect: exit=0",
        "# A 1: x\n# expect: status=ok\n# limit: wall_s=1",
        "# A 1: x\n# expect: status=ok\n# limits: walls=1",
        "# A 1: x\n# expect: status=ok\n# expect: status=error",
        "# A 1: x\n# expect: status=ok colour=red",
    ],
)
def test_header_that_nobody_understands_is_an_error(tmp_path: Path, header: str) -> None:
    with pytest.raises(BadHeader):
        parse(write(tmp_path, header))


def right(stdout: str = "contained\n", wall_s: float = 0.1, tier: Sandbox = TIER_A) -> Result:
    return verdict("ok", stdout=stdout, exit_code=0, usage=Usage(wall_s=wall_s), sandbox=tier)


def test_right_end_is_right(tmp_path: Path) -> None:
    assert judge(made(tmp_path, "status=ok"), right()) == []
    assert judge(made(tmp_path, "status=ok|error exit=0 blame=none stdout='a\\n'"), right("a\n")) == []


@pytest.mark.parametrize(
    ("expect", "result"),
    [
        ("status=timeout", right()),
        ("status=ok", right("escaped: x\n")),
        ("status=ok stdout_has=x", right("escaped: x\n")),
        ("status=ok", right("")),
        ("status=ok stdout=''", right()),
        ("status=ok exit=1", right()),
        ("status=ok blame=model", right()),
        ("status=ok max_wall_s=1", right(wall_s=1.1)),
        ("status=ok", right(wall_s=7)),
        ("status=ok files=a", right()),
        ("status=ok completed=yes", right()),
        ("status=ok stderr_has=x", right()),
        ("status=error", verdict("error", infra=True, sandbox=TIER_A)),
        ("status=error", verdict("error", stdout="escaped: x", sandbox=TIER_A)),
    ],
)
def test_wrong_end_is_seen(tmp_path: Path, expect: str, result: Result) -> None:
    assert judge(made(tmp_path, expect), result)


def test_weaker_tiers_have_their_own_expectations(tmp_path: Path) -> None:
    program = made(tmp_path, "status=memory_limit", **{"tier-CD": "status=ok stdout='d\\n'", "without cgroup": "status=error"})
    no_cgroup = [layer for layer in ALL_LAYERS if layer != "cgroup"]
    assert program.expectation(TIER_A).status == ("memory_limit",)
    assert program.expectation(Sandbox("B", no_cgroup)).status == ("error",)
    assert judge(program, right("d\n", tier=Sandbox("D", list(ALL_LAYERS)))) == []


def test_program_that_needs_what_is_missing_is_skipped_with_a_reason(tmp_path: Path) -> None:
    program = made(tmp_path, "status=ok", needs="landlock|mntns cpp")
    assert "landlock or mntns" in program.lacking(Sandbox("E", []), {"cpp"})
    assert program.lacking(Sandbox("C", ["mntns"]), {"cpp"}) == ""
    assert "C++" in program.lacking(TIER_A, set())
    assert program.lacking(TIER_A, {"cpp"}) == ""
