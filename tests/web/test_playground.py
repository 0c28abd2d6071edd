"""What the playground does besides running a program: colours, copies, links, files, what is kept, what it says."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_harness import Service
from web_harness import need_built_editor, opened, until, write, written

AWKWARD = "import sys\nprint('it\\'s', \"$HOME `id`\", sys.stdin.read(), '\\u2713 ✓ 😀')  # \"\"\" END\nEND = '\\\\'\n"
MIRROR = """import os
os.mkdir("out")
open("out/copy.bin", "wb").write(open("in put.bin", "rb").read()[::-1])
print(os.listdir())
"""
CLIPBOARD = ["clipboard-read", "clipboard-write"]


@pytest.fixture
def page(browser: Any, service: Service) -> Iterator[Any]:
    need_built_editor()
    with opened(browser, service.url, permissions=CLIPBOARD) as page:
        yield page


def run(page: Any, code: str | None = None) -> str:
    """The whole of the result as text."""
    if code is not None:
        write(page, "#code", code)
    page.click("#run")
    until(lambda: page.is_enabled("#run") and page.locator("#verdict").count() == 1, page)
    return str(page.inner_text("#result-body"))


def copied(page: Any, button: str) -> str:
    page.evaluate("navigator.clipboard.writeText('')")
    page.click(button)
    until(lambda: page.evaluate("navigator.clipboard.readText()") != "", page)
    return str(page.evaluate("navigator.clipboard.readText()"))


COLOURS = """() => [...document.querySelector("#editor").shadowRoot.querySelectorAll(".cm-line span")]
  .map((part) => getComputedStyle(part).color)"""


@pytest.mark.parametrize("language", ["python", "cpp", "bash", "javascript"])
def test_a_program_has_the_colours_of_its_language(page: Any, language: str) -> None:
    if language not in page.locator("#language option").all_inner_texts():
        pytest.skip(f"this machine does not run {language}")
    page.select_option("#language", language)
    page.select_option("#example", "Hello")
    until(lambda: len(set(page.evaluate(COLOURS))) >= 3, page)


def test_undo_gives_back_what_was_typed_over(page: Any) -> None:
    write(page, "#code", "first = 1")
    page.wait_for_timeout(600)  # changes within half a second are undone together
    write(page, "#code", "second = 2")
    page.keyboard.press("Control+z")
    assert written(page) == "first = 1"


def fill_awkward(page: Any) -> None:
    page.fill("#stdin", 'it\'s "stdin" \\ $PATH')
    page.fill("#limit-wall_s", "7")
    page.check("#echo-value")
    write(page, "#code", AWKWARD)


def test_the_curl_command_does_what_the_page_does(page: Any) -> None:
    fill_awkward(page)
    command = copied(page, "#copy-curl")
    answer = json.loads(subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout)
    run(page)
    assert answer["status"] == "ok" and answer["stdout"] == page.inner_text("#stdout")


def test_the_python_program_does_what_the_page_does(page: Any) -> None:
    for code in (AWKWARD, "print('plain')\n"):
        fill_awkward(page)
        write(page, "#code", code)
        program = copied(page, "#copy-python")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        run(page)
        assert done.stdout.strip() == page.inner_text("#stdout").strip()
        assert "limits=Limits(wall_s=7)" in program and "priority" not in program


def test_copying_works_where_scripts_have_no_clipboard(page: Any) -> None:
    """As on a page that came over plain HTTP from another machine."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.click("#copy-curl")
    page.get_by_text("is in the clipboard").wait_for()
    page.focus("#stdin")
    page.keyboard.press("Control+v")
    assert page.input_value("#stdin").startswith("curl -s ")


def test_a_link_carries_the_program_and_runs_nothing(page: Any, browser: Any, service: Service) -> None:
    fill_awkward(page)
    link = copied(page, "#copy-link")
    assert link.startswith(f"{service.url}/#program=")
    calls = service.metric('exec_calls_total{blame="none",status="ok"}')
    with opened(browser, service.url, fragment=link.removeprefix(service.url)) as other:
        assert written(other) == AWKWARD
        assert other.input_value("#stdin") == 'it\'s "stdin" \\ $PATH' and other.input_value("#limit-wall_s") == "7"
        assert other.is_checked("#echo-value") and "came with the link" in other.inner_text("#call-note")
        assert other.locator("#verdict").count() == 0 and other.evaluate("location.hash") == "#playground"
        write(other, "#code", "print('changed')")
        other.reload()
        other.wait_for_selector("#limit-wall_s")
        assert written(other) == "print('changed')"
    assert service.metric('exec_calls_total{blame="none",status="ok"}') == calls


@pytest.mark.parametrize("fragment", ["#program=", "#program=%%%", "#program=bnVsbA", "#program=eyJjb2RlIjogN30"])
def test_a_broken_link_is_said_to_be_one(browser: Any, service: Service, fragment: str) -> None:
    with opened(browser, service.url, fragment=f"/{fragment}") as page:
        assert "no program that can be read" in page.inner_text("#call-note")
        assert "squared" in written(page)


def test_files_go_up_with_the_call_and_come_down_with_the_result(page: Any, tmp_path: Path) -> None:
    content = bytes(range(256)) * 300
    (tmp_path / "in put.bin").write_bytes(content)
    (tmp_path / "unwanted.txt").write_text("x")
    page.set_input_files("#upload", [tmp_path / "in put.bin", tmp_path / "unwanted.txt"])
    page.get_by_role("button", name="Remove unwanted.txt").click()
    assert page.locator("#uploads li").count() == 1 and "75 KiB" in page.inner_text("#uploads")
    page.fill("#fetch-files", "out/copy.bin, missing.txt")
    run(page, MIRROR)
    assert "unwanted" not in page.inner_text("#stdout")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download out/copy.bin").click()
    assert download.value.suggested_filename == "copy.bin" and Path(download.value.path()).read_bytes() == content[::-1]
    assert "missing.txt" in page.inner_text("#fetched") and "not fetched" in page.inner_text("#fetched")


def test_files_that_no_request_can_carry_are_refused_at_once(page: Any, tmp_path: Path) -> None:
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(1 << 30)
    page.set_input_files("#upload", tmp_path / "huge.bin")
    until(lambda: "Not added" in page.inner_text("#call-note"), page)
    assert page.locator("#uploads li").count() == 0


def test_program_and_results_are_there_after_a_reload(page: Any) -> None:
    run(page, "print('first')")
    run(page, "1 / 0")
    page.fill("#stdin", "half a th")
    page.fill("#limit-memory_mb", "99")
    write(page, "#code", "draft = True")
    page.reload()
    page.wait_for_selector("#limit-wall_s")
    assert (written(page), page.input_value("#stdin"), page.input_value("#limit-memory_mb")) == (
        "draft = True",
        "half a th",
        "99",
    )
    assert "ZeroDivisionError" in page.inner_text("#stderr")
    page.get_by_role("button", name="1 · ok").click()
    assert page.inner_text("#stdout") == "first\n"
    page.get_by_role("button", name="Edit this program again").click()
    assert written(page) == "print('first')"
    page.get_by_role("button", name="Forget all results").click()
    page.reload()
    page.wait_for_selector("#limit-wall_s")
    assert page.is_visible("#nothing-yet") and not page.is_visible("#history")


def test_results_that_another_version_kept_are_forgotten(page: Any) -> None:
    page.evaluate("localStorage.setItem('playground-results', '[{\"number\": 1, \"result\": {}}]')")
    page.reload()
    page.wait_for_selector("#limit-wall_s")
    until(lambda: "2 slots" in page.inner_text("#state"), page)
    assert page.is_visible("#nothing-yet") and "42" in run(page, "print(42)")


def test_the_example_follows_the_language_unless_the_program_is_the_users_own(page: Any) -> None:
    page.select_option("#example", "Standard input")
    page.select_option("#language", "bash")
    assert "read -r" in written(page) and page.input_value("#example") == "Standard input"
    assert "189" in run(page)
    page.select_option("#language", "python")
    assert "input()" in written(page)
    write(page, "#code", "echo mine")
    assert page.input_value("#example") == ""
    page.select_option("#language", "bash")
    assert written(page) == "echo mine" and "mine" in run(page)


def test_a_stopped_run_is_called_stopped(page: Any) -> None:
    write(page, "#code", "import time\ntime.sleep(60)")
    page.click("#run")
    page.click("#stop")
    page.get_by_role("button", name="1 · stopped").wait_for()
    assert "Stopped" in page.inner_text("#verdict") and "not run" not in page.inner_text("#result").lower()


def test_a_run_has_one_duration_and_its_stages_add_up_to_it(page: Any) -> None:
    text = run(page, "import time\ntime.sleep(0.2)")
    [took] = re.findall(r"Finished in (\d+) ms", text)
    assert text.count(f"{took} ms") == 1 and "total" not in text and "Wall time" not in text
    stages = [
        float(ms) for ms in re.findall(r"(?:waiting|starting|running|between these)\s+([\d.]+) ms", page.inner_text("#timings"))
    ]
    assert len(stages) == 4 and abs(sum(stages) - float(took)) <= 1


def test_usage_and_limit_have_the_same_unit(page: Any) -> None:
    run(page, "print(1)")
    usage = page.inner_text("#usage")
    assert re.search(r"[\d.]+ s of [\d.]+ s", usage) and re.search(r"[\d.]+ MiB of 512 MiB", usage) and "MB" not in usage


def test_on_a_phone_the_result_scrolls_into_view(browser: Any, service: Service) -> None:
    with opened(browser, service.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True) as page:
        assert not page.evaluate(IN_VIEW, "#result")
        page.tap("#run")
        page.wait_for_selector("#verdict")
        until(lambda: page.evaluate(IN_VIEW, "#verdict"), page)


IN_VIEW = """(id) => {
  const { top, bottom } = document.querySelector(id).getBoundingClientRect();
  return top >= 0 && top < innerHeight / 2;
}"""


def test_the_header_says_when_the_service_is_unavailable_and_when_it_is_back(browser: Any, service: Service) -> None:
    with opened(browser, service.url, expected="net::ERR_INTERNET_DISCONNECTED") as page:
        page.fill("#limit-wall_s", "8")
        page.context.set_offline(True)
        until(lambda: "Service unavailable" in page.inner_text("#state"), page)
        assert "bad" in page.get_attribute("#state", "class")
        page.click("#run")
        page.get_by_role("button", name="1 · no answer").wait_for()
        page.context.set_offline(False)
        until(lambda: "2 slots" in page.inner_text("#state"), page)
        assert "bad" not in page.get_attribute("#state", "class") and page.input_value("#limit-wall_s") == "8"


def test_the_header_says_when_there_is_no_worker(browser: Any, service: Service) -> None:
    info = service.http.get("/v1/info").json()
    with opened(browser, service.url) as page:
        page.route("**/v1/info", lambda route: route.fulfill(json=info | {"workers": 0, "slots": 0, "languages": []}))
        until(lambda: "No worker" in page.inner_text("#state"), page)
        assert page.input_value("#language") == "python"
