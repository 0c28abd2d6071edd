"""A headless Chromium that looks at a real service, and a load of the kinds of calls that a training run makes."""

import contextlib
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from common import unavailable

from exec_service.api.web_page import BUILT_EDITOR, PLAIN_EDITOR

PATIENCE_MS = 120_000
WIDTHS = {390: 844, 768: 1024, 1440: 960}  # a phone, a tablet, a screen; and their heights
THEMES = ("light", "dark")
SCRIPT = "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\"><b>bold</b>"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    return next((path for name in CHROMIUM if (path := shutil.which(name))), None)


def need_built_editor() -> None:
    if not BUILT_EDITOR.is_file():
        unavailable("the page's editor is not built: install npm, then make install")


@contextlib.contextmanager
def browsing() -> Iterator[Any]:
    """A browser of playwright's."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("playwright is missing: make install-dev")
    path = chromium()
    if path is None:
        unavailable("there is no Chromium: sh deploy/test-tools.sh")
    with sync_playwright() as playwright:
        # Root has no use for Chromium's own sandbox, and a container lets nobody have it.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(
    browser: Any,
    url: str,
    *,
    fragment: str = "",
    plain: bool = False,
    expected: str = "",
    ready: str = "#limit-wall_s",
    **settings: Any,
) -> Iterator[Any]:
    """The page with nothing kept from before; ends with a look at what the browser complained of.

    `ready`: an element that is there when the page is. `plain`: with the editor of a machine that has no npm. `expected`: words
    of complaints that belong to the test. `settings` are those of playwright's contexts.
    """
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | settings)
    page = context.new_page()
    if plain:
        page.route("**/web/editor.js", lambda route: route.fulfill(path=PLAIN_EDITOR, content_type="text/javascript"))
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if is_complaint(message, expected) else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    outside: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(url) else outside.append(request.url))
    page.goto(url + fragment)
    page.wait_for_selector(ready, state="attached")
    yield page
    context.close()
    assert (complaints, outside) == ([], [])


def is_complaint(message: Any, expected: str) -> bool:
    """A refusal of the service is none: Chromium notes every 4xx."""
    known = "the server responded with a status of 4" in message.text or (expected and expected in message.text)
    return message.type in ("error", "warning") and not known


def write(page: Any, editor: str, text: str) -> None:
    """In the place of what the editor holds, as if pasted."""
    page.focus(editor)
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)


def written(page: Any, editor: str = "#code") -> str:
    """The text of an editor: a text area, or CodeMirror's lines."""
    return str(page.locator(editor).evaluate(TEXT))


TEXT = """(editor) => editor.value ?? [...editor.querySelectorAll(".cm-line")].map((line) => line.textContent).join("\\n")"""
# The focus in the page, and in CodeMirror's shadow root if it is there.
FOCUSED = "(document.activeElement.shadowRoot?.activeElement ?? document.activeElement)"


def until(true: Callable[[], bool], page: Any) -> None:
    """Looked at from here: playwright's own way evaluates strings, which the page's policy forbids."""
    give_up = time.monotonic() + PATIENCE_MS / 1000
    while not true():
        assert time.monotonic() < give_up
        page.wait_for_timeout(100)


def call(number: int) -> dict[str, Any]:
    """What a rollout sends: most of it works, some of it fails, a little takes long."""
    codes = [
        f"print({number} * 7)",
        f"import math\nprint(math.factorial({number % 40}))",
        f"print(sum(range({number % 1000})))",
        "print(int(input()) + 1)" if number % 2 else "{}['missing']",
        f"import time\ntime.sleep({0.01 + 0.08 * (number % 5 == 0)})",
    ]
    run, tenant = [("qwen-tool-7b", "lab"), ("qwen-tool-7b", "lab"), ("math-eval", "evals"), ("", "")][number // 3 % 4]
    return {
        "code": codes[number % len(codes)],
        "stdin": "41\n",
        "tags": {"run": run, "step": number // 400} if run else {},
        "tenant": tenant,
        "limits": {"wall_s": 5},
    }


@contextlib.contextmanager
def load(url: str, *, callers: int = 4, per_batch: int = 16) -> Iterator[None]:
    """Batches without a pause, until the end of the block."""
    stop, numbers = threading.Event(), itertools.count()

    def send() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not stop.is_set():
                calls = [call(next(numbers)) for _ in range(per_batch)]
                client.post("/v1/batch", json={"calls": calls}).raise_for_status()

    threads = [threading.Thread(target=send) for _ in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
