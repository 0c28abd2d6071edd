"""The documentation is true: its examples run and print what it says, its links lead somewhere, its lists are complete.

A fenced `python` block of README.md, the quickstart and the guides runs, and prints the block after it. The `sh` blocks of a
page run in one shell, from top to bottom, against the same service; a block with `not-run=REASON` after `sh` does not.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import httpx
import pytest
from common import unavailable, wait_until

from exec_wire.messages.calls import Status
from worker.config import default_packages
from worker.sandbox.tiers import ALL_LAYERS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
URL_IN_TEXT = "http://127.0.0.1:8080"
START_S, EXAMPLE_S, STOP_S = 120.0, 90.0, 60.0
EXAMPLES_PRINT = {
    "tool_loop.py": """\
clean      reward 1.0  tool calls 2  tool errors 0
repaired   reward 1.0  tool calls 2  tool errors 1
too slow   reward 1.0  tool calls 3  tool errors 1
wrong      reward 0.0  tool calls 1  tool errors 0
mean reward 0.75 of 4 rollouts
""",
    "judge.py": """\
right      AC  score 1.00  (AC AC AC)
overflow   WA  score 0.67  (AC AC WA)
endless    TLE score 0.00  (TLE TLE TLE)
crash      RE  score 0.00  (RE RE RE)
cheat      WA  score 0.00  (WA WA WA)
syntax     RE  score 0.00  (RE RE RE)
0.5              equal: True  (compared: \\frac{1}{2})
(x - 1)(x + 1)   equal: True  (compared: x^2 - 1)
8                equal: False  (compared: I think it is 7.)
""",
}
MEASURED = ("usage", "timings", "request_id", "sandbox")  # differ between two calls, or two machines

GUIDES = "quickstart client sessions judging jobs keys grpc cluster operations metrics limits performance".split()
RUN_PAGES = [
    *[ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in GUIDES)],
    *sorted((ROOT / "docs" / "move").glob("*.md")),
]
NOT_RUN = {  # why a block of shell commands is not run
    "serves": "starts another service, which does not end",
    "cluster": "needs a cluster, or machines that do not exist",
    "docker": "needs docker",
    "kubernetes": "needs kubectl, helm and a cluster",
    "minutes": "takes minutes",
    "tool": "needs a program that is not installed with the service",
}
REWRITES = [  # what a block says of the default address, for a service on another port
    (re.compile(r"(examples/\w+\.(?:py|sh))(?=\s)"), r"\1 http://127.0.0.1:8080"),
    (re.compile(r"(exec-service jobs \w+)"), r"\1 --url http://127.0.0.1:8080"),
    (re.compile(r"^make install\b.*$", re.M), ":"),
]
SHELL = """set -eu
curl() { command curl --fail-with-body "$@"; echo; }
"""
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    info: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(page.name, text.count("\n", 0, m.start()) + 1, m[1], m[2].strip(), m[3]) for m in _BLOCK.finditer(text)]


def examples(language: str, answer_in: str) -> Iterator[Any]:
    """Each example of the pages that run, and the block that holds its answer."""
    for page in RUN_PAGES:
        for example, answer in itertools.pairwise(blocks(page)):
            shown = language == "python" or (example.text.startswith("curl") and answer.language == answer_in)
            if example.language == language and shown:
                yield pytest.param(example, answer, id=f"{example.page}:{example.line}")


def shell_pages() -> Iterator[Any]:
    for page in RUN_PAGES:
        if any(block.language == "sh" and not block.info for block in blocks(page)):
            yield pytest.param(page, id=str(page.relative_to(ROOT)))


class Service(NamedTuple):
    url: str
    pid: int


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A real `exec-service up` on a free port."""
    if not Path(default_packages()).is_dir():
        unavailable("what programs may import is not installed (run `make install`)")
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "exec_service", "up", "--port", "0", "--grpc-port", "0"]
        command += ["--jobs-dir", str(tmp_path_factory.mktemp("jobs"))]
        profiles = {"EXEC_PROFILES": '{"bare": [], "sympy": ["sympy"], "verify": ["math_verify"]}'}
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | profiles, stderr=log)
        try:
            yield Service(wait_until_ready(process, log), process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


@pytest.fixture
def url(service: Service) -> str:
    return service.url


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like a checkout with its environment; files that a command makes there do not reach ours."""
    for path in ROOT.iterdir():
        if path.name != ".venv":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def skip_without_forks(page: str, url: str) -> None:
    if page == "sessions.md" and httpx.get(f"{url}/readyz").json()["tier"] in "DE":
        pytest.skip("sessions cannot be forked in this tier")


def wait_until_ready(service: subprocess.Popen[bytes], log: Any) -> str:
    def words() -> str:
        log.seek(0)
        return str(log.read())

    ready = r"is ready on (\S+) "
    wait_until(
        lambda: re.search(f"{ready}|cannot run programs here", words()) or service.poll() is not None, words, START_S, 0.1
    )
    if "cannot run programs here" in words():
        unavailable(words())
    started = re.search(ready, words())
    assert started, f"the service did not start:\n{words()}"
    return started[1]


def run(command: list[str], url: str, folder: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = [part.replace(URL_IN_TEXT, url) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=EXAMPLE_S, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("example", "answer"), list(examples("python", "text")))
def test_python_example_prints_its_answer(example: Block, answer: Block, url: str, tmp_path: Path) -> None:
    skip_without_forks(example.page, url)
    assert answer.language == "text"
    assert URL_IN_TEXT in example.text
    assert run([sys.executable, "-c", example.text], url, tmp_path) == answer.text


@pytest.mark.parametrize(("example", "answer"), list(examples("sh", "json")))
def test_curl_example_gets_its_answer(example: Block, answer: Block, url: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    got, told = json.loads(run(["sh", "-c", example.text], url, tmp_path)), json.loads(answer.text)
    assert list(got) == list(told)
    for field in ("usage", "timings", "sandbox"):
        assert list(got[field]) == list(told[field])
    for field in MEASURED:
        del got[field], told[field]
    assert got == told


def test_readme_has_an_example_of_each_kind() -> None:
    """Else the tests above would test nothing."""
    assert any(param.values[0].page == "README.md" for param in examples("python", "text"))
    assert any(param.values[0].page == "README.md" for param in examples("sh", "json"))


@pytest.mark.parametrize("page", list(shell_pages()))
def test_shell_blocks_run_as_pasted(page: Path, url: str, checkout: Path) -> None:
    skip_without_forks(page.name, url)
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    script = "\n".join(block.text for block in blocks(page) if block.language == "sh" and not block.info)
    for pattern, replacement in REWRITES:
        script = pattern.sub(replacement, script)
    activate = "" if "activate" in script else "source .venv/bin/activate\n"
    run(["bash", "-c", SHELL + activate + script], url, checkout)


def test_every_shell_block_runs_or_says_why_not() -> None:
    tested = {*RUN_PAGES, ROOT / "docs" / "packages.md"}  # the last one by test_packages.py
    for page in PAGES:
        for block in blocks(page):
            runs = not block.info and (block.language != "sh" or page in tested)
            assert runs or block.info.removeprefix("not-run=") in NOT_RUN, f"{page.name}:{block.line}"


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("[CS]*.md"))], ids=lambda page: page.name)
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in _LINK.findall(_BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not heading or heading in headings(target), f"{page.name} links to {link}"


def headings(page: Path) -> set[str]:
    """As a browser names them: lower case, without punctuation, words joined by hyphens."""
    titles = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_map_of_the_documentation_names_every_page() -> None:
    linked = set(_LINK.findall((ROOT / "docs" / "README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - linked == {"README.md"}


@pytest.mark.parametrize("name", ["tool_loop.py", "judge.py"])
def test_python_example_of_the_examples_folder_runs(name: str, url: str, tmp_path: Path) -> None:
    told = run([sys.executable, str(ROOT / "examples" / name), url], url, tmp_path)
    assert told == EXAMPLES_PRINT[name]


def test_statuses_lists_exactly_the_statuses_of_the_wire() -> None:
    table = (ROOT / "docs" / "statuses.md").read_text().partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == set(get_args(Status))


def test_readme_names_every_status() -> None:
    text = (ROOT / "README.md").read_text()
    assert [status for status in get_args(Status) if f"`{status}`" not in text] == []


def test_security_names_every_step_in_its_order() -> None:
    zygote = pytest.importorskip("worker.sandbox.inside._zygote")
    section = (ROOT / "docs" / "security.md").read_text().partition("\n## Around each program")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.M) == list(zygote.steps())


def test_security_names_every_layer() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    assert [layer for layer in ALL_LAYERS if f"`{layer}`" not in text] == []


def test_operating_example_looks_at_a_service_and_drains_it(service: Service, tmp_path: Path) -> None:
    """The last test here: it ends the service."""
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    told = run(["sh", str(ROOT / "examples" / "operate.sh"), service.url, str(service.pid)], service.url, tmp_path)
    assert "exec_slots " in told and "a new call: HTTP 503" in told
    assert "the accepted call: accepted before the drain, and finished" in told
