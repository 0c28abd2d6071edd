"""The documentation is true: its examples print what it says, its links lead somewhere, its lists are complete.

An example is a fenced `python` block, or a `sh` block that begins with curl; the block after it holds what it prints.
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

import pytest
from common import unavailable, wait_until

from exec_wire.messages.calls import Status
from worker.config import default_packages
from worker.sandbox.tiers import ALL_LAYERS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
URL_IN_TEXT = "http://127.0.0.1:8080"
START_S, EXAMPLE_S, STOP_S = 120.0, 90.0, 60.0
MEASURED = ("usage", "timings", "request_id", "sandbox")  # differ between two calls, or two machines

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(page.name, text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in _BLOCK.finditer(text)]


def examples(language: str) -> Iterator[Any]:
    """Each example of README.md and docs/client.md, and the block that holds its answer."""
    for page in (ROOT / "README.md", ROOT / "docs" / "client.md"):
        found = blocks(page)
        for example, answer in itertools.pairwise(found):
            if example.language == language and (language != "sh" or example.text.startswith("curl")):
                yield pytest.param(example, answer, id=f"{example.page}:{example.line}")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A real `exec-service up` on a free port."""
    if not Path(default_packages()).is_dir():
        unavailable("what programs may import is not installed (run `make install`)")
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "exec_service", "up", "--port", "0", "--grpc-port", "0"]
        profiles = {"EXEC_PROFILES": '{"bare": [], "sympy": ["sympy"]}'}
        service = subprocess.Popen(command, cwd=ROOT, env=os.environ | profiles, stderr=log)
        try:
            yield wait_until_ready(service, log)
        finally:
            service.send_signal(signal.SIGTERM)
            try:
                service.wait(STOP_S)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()
                raise


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


@pytest.mark.parametrize(("example", "answer"), list(examples("python")))
def test_python_example_prints_its_answer(example: Block, answer: Block, url: str, tmp_path: Path) -> None:
    assert answer.language == "text"
    assert URL_IN_TEXT in example.text
    assert run([sys.executable, "-c", example.text], url, tmp_path) == answer.text


@pytest.mark.parametrize(("example", "answer"), list(examples("sh")))
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
    assert any(param.values[0].page == "README.md" for param in examples("python"))
    assert any(param.values[0].page == "README.md" for param in examples("sh"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
