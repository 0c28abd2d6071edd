"""The page's sessions in headless Chromium: cells, forks and their tree, in front of a real service."""

import base64
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from service_harness import Service
from web_harness import FOCUSED, SCRIPT, opened, until, write


@pytest.fixture
def page(browser: Any, service: Service) -> Iterator[Any]:
    with opened(browser, service.url) as page:
        page.click("#to-sessions")
        yield page
    for session in service.http.get("/v1/sessions").json()["sessions"]:
        service.http.delete(f"/v1/sessions/{session['id']}")


def start(page: Any) -> None:
    before = page.locator("#fork-tree .node").count()
    page.click("#start-session")
    until(lambda: page.locator("#fork-tree .node").count() == before + 1, page)
    page.wait_for_selector("#notebook:not([hidden])")


def run(page: Any, code: str) -> Any:
    """As a user does without a mouse; the cell that became of it."""
    before = page.locator("#cells > li").count()
    write(page, "#cell-code", code)
    page.keyboard.press("Control+Enter")
    until(lambda: page.locator("#cells > li").count() == before + 1, page)
    cell = page.locator("#cells > li").nth(before)
    cell.locator(".ending, .verdict").wait_for()
    until(lambda: page.is_enabled("#end-session"), page)
    return cell


def value(page: Any, code: str) -> str:
    return str(run(page, code).locator(".value pre").inner_text())


def choose(page: Any, name: str) -> None:
    page.locator("#fork-tree .node").filter(has=page.get_by_text(name, exact=True)).click()
    until(lambda: page.inner_text("#session-name") == f"Session {name}", page)


def tree(page: Any) -> dict[str, tuple[str, str]]:
    """Name -> the one above it in the drawn tree, and its state."""
    rows = page.evaluate("""() => [...document.querySelectorAll("#fork-tree .node")].map((node) => {
      const above = node.closest("li").parentElement.closest("li");
      return [node.querySelector("b").textContent, above ? above.querySelector("b").textContent : "", node.dataset.state];
    })""")
    return {name: (above, state) for name, above, state in rows}


def test_forks_go_their_own_way_and_the_tree_shows_them(page: Any) -> None:
    start(page)
    assert value(page, "x = [1]\nx") == "[1]"
    page.fill("#fork-count", "2")
    page.click("#fork")
    until(lambda: len(tree(page)) == 3, page)
    choose(page, "1.1")
    assert "run before the fork" in page.inner_text("#cells")
    assert value(page, "x.append(2)\nx") == "[1, 2]"
    choose(page, "1.2")
    assert value(page, "x") == "[1]"
    page.fill("#fork-count", "1")
    page.click("#fork")
    choose(page, "1.2.1")
    assert value(page, "x") == "[1]"
    choose(page, "1")
    assert value(page, "x") == "[1]"
    assert tree(page) == {"1": ("", "idle"), "1.1": ("1", "idle"), "1.2": ("1", "idle"), "1.2.1": ("1.2", "idle")}
    page.click("#end-session")
    until(lambda: tree(page)["1"] == ("", "gone"), page)
    choose(page, "1.2.1")
    assert value(page, "x") == "[1]"  # forks outlive the one that they were forked from
    page.reload()
    until(lambda: sorted(above for above, _ in tree(page).values()) == ["", "1", "1", "1.2"], page)
    assert next(iter(tree(page).values()))[1] == "gone"


def test_a_cell_shows_output_traceback_and_picture_and_nothing_becomes_markup(page: Any) -> None:
    start(page)
    cell = run(page, f"print({SCRIPT!r})\n1 / 0")
    assert cell.locator(".out pre").first.inner_text() == f"{SCRIPT}\n"
    assert "ZeroDivisionError" in cell.locator(".err pre").inner_text() and "<cell 1>" in cell.locator(".err pre").inner_text()
    assert cell.locator("b:has-text('bold')").count() == 0
    shows = f"class Both:\n    def _repr_html_(self): return {SCRIPT!r}\nBoth()"
    assert run(page, shows).get_by_label("text/html, as text").inner_text() == SCRIPT
    picture = f"class Picture:\n    def _repr_png_(self): return __import__('base64').b64decode({png(30, 20)!r})\nPicture()"
    canvas = run(page, picture).locator("canvas")
    canvas.wait_for()
    assert canvas.evaluate("(c) => [c.width, c.height, ...c.getContext('2d').getImageData(3, 3, 1, 1).data]") == [
        *(30, 20),
        *(200, 30, 40, 255),
    ]
    huge = f"class Huge:\n    def _repr_png_(self): return __import__('base64').b64decode({png(30, 20, 60000)!r})\nHuge()"
    run(page, huge).get_by_text("too large to be shown").wait_for()
    assert page.title() == "Sessions · exec-service"


def png(width: int, height: int, claimed: int = 0) -> str:
    """One colour. `claimed`: how wide its head says that it is."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", claimed or width, claimed or height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes([200, 30, 40]) * width) * height
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


def test_a_crash_can_be_rolled_back(page: Any) -> None:
    start(page)
    run(page, "x = 41")
    assert "The variables are lost" in run(page, "x = 0\nimport os\nos.abort()").locator(".ending").inner_text()
    until(lambda: tree(page)["1"][1] == "ended", page)
    assert page.is_disabled("#run-cell") and page.is_disabled("#fork")
    page.click("#roll-back")
    page.get_by_text("rolled back").wait_for()
    assert value(page, "x + 1") == "42"


def test_a_running_cell_can_be_interrupted_and_another_session_used_meanwhile(page: Any) -> None:
    start(page)
    write(page, "#cell-code", "y = 5\nimport time\ntime.sleep(9)")
    page.click("#run-cell")
    until(lambda: tree(page)["1"][1] == "running", page)
    start(page)
    assert value(page, "6 * 7") == "42"
    choose(page, "1")
    page.click("#interrupt")
    page.get_by_text("KeyboardInterrupt").first.wait_for()
    until(lambda: page.is_enabled("#run-cell"), page)
    assert value(page, "y") == "5"


def test_what_is_refused_says_why(page: Any) -> None:
    start(page)
    run(page, "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
    page.click("#fork")
    page.locator("#session-says .verdict").wait_for()
    assert "Not forked" in page.inner_text("#session-says") and "not_forkable" in page.inner_text("#session-says")


def test_the_tree_is_walked_by_arrow_keys_and_every_button_reached_by_tab(page: Any) -> None:
    start(page)
    page.click("#fork")
    until(lambda: len(tree(page)) == 3, page)
    page.locator("#fork-tree .node").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until(lambda: page.inner_text("#session-name") == "Session 1.1", page)
    page.focus("#profile")
    reached = set()
    for _ in range(14):
        reached.add(page.evaluate(f"{FOCUSED}.id"))
        if page.evaluate(f"{FOCUSED}.id") == "cell-code":
            page.keyboard.press("Escape")
        page.keyboard.press("Tab")
    assert {"start-session", "auto-checkpoint", "fork-count", "fork", "end-session", "cell-code", "run-cell"} <= reached
