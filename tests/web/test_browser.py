"""The page at `/` in headless Chromium, in front of a real service."""

from collections.abc import Iterator
from typing import Any

import pytest
from service_harness import Service
from web_harness import FOCUSED, SCRIPT, load, need_built_editor, opened, until, write, written


@pytest.fixture(params=["built", "plain"])
def page(browser: Any, service: Service, request: pytest.FixtureRequest) -> Iterator[Any]:
    """With both editors."""
    if request.param == "built":
        need_built_editor()
    with opened(browser, service.url, plain=request.param == "plain") as page:
        yield page


def run(page: Any, code: str) -> str:
    """Run it as a user does without a mouse; what the page says of it."""
    write(page, "#code", code)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#verdict")
    return str(page.inner_text("#verdict"))


def test_a_program_is_run_and_its_output_times_and_usage_are_shown(page: Any) -> None:
    page.fill("#stdin", "40 2")
    words = run(page, "print(sum(map(int, input().split())))")
    assert "Finished" in words and "Exit code 0" in words
    assert page.inner_text("#stdout") == "42\n"
    assert "waiting" in page.inner_text("#timings") and "running" in page.inner_text("#timings")
    assert "Memory peak" in page.inner_text("#usage")


def test_a_time_out_is_explained(page: Any) -> None:
    page.fill("#limit-wall_s", "0.5")
    words = run(page, "import time\nprint('begun', flush=True)\ntime.sleep(60)")
    assert "Timed out" in words and "its limit of wall time is 0.5 s" in words
    assert "The program is to blame" in words
    assert page.inner_text("#stdout") == "begun\n"


def test_a_failure_shows_the_traceback_and_the_exit_code(page: Any) -> None:
    assert "exit code 1" in run(page, "{}['missing']")
    assert "KeyError" in page.inner_text("#stderr")


def test_output_is_text_whatever_it_contains(page: Any) -> None:
    run(page, f"print({SCRIPT!r})")
    assert page.inner_text("#stdout") == f"{SCRIPT}\n"
    assert page.locator("#stdout *").count() == 0
    assert page.title() == "exec-service"


def test_what_the_service_refuses_names_the_field(page: Any) -> None:
    page.evaluate("document.querySelector('#limit-processes').removeAttribute('max')")
    page.fill("#limit-processes", "99999")
    assert "processes" in run(page, "print(1)")


def test_a_running_program_can_be_stopped(page: Any, service: Service) -> None:
    write(page, "#code", "import time\ntime.sleep(60)")
    page.click("#run")
    page.click("#stop")
    page.wait_for_selector("#verdict.is-client")
    assert "Stopped" in page.inner_text("#verdict")


def test_earlier_results_can_be_looked_at_again(page: Any) -> None:
    run(page, "print('first')")
    page.evaluate("document.querySelector('#verdict').remove()")
    run(page, "print('second')")
    page.get_by_role("button", name="1 · ok").click()
    assert page.inner_text("#stdout") == "first\n"


def test_tab_indents_and_after_escape_leaves_the_editor(page: Any) -> None:
    write(page, "#code", "")
    page.keyboard.type("if True:")
    page.keyboard.press("Enter")
    page.keyboard.type("pass")
    assert written(page) == "if True:\n    pass"
    page.keyboard.press("Tab")
    assert written(page).endswith("pass    ")
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "copy-curl"


def test_the_theme_is_the_systems_until_one_is_chosen(page: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert dark != light
    page.click("#theme-button")
    page.click("#theme-button")
    assert page.evaluate(ground) == dark
    page.reload()
    page.wait_for_selector("#limit-wall_s")
    assert page.evaluate(ground) == dark


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_enough_contrast(page: Any, theme: str) -> None:
    """WCAG AA: 4.5 to 1. Of the colours that carry words, on the grounds that they stand on."""
    page.emulate_media(color_scheme=theme)
    pairs = [
        ("ink", "panel"),
        ("muted", "panel"),
        ("muted", "ground"),
        ("muted", "sunk"),
        ("accent", "panel"),
        ("on-accent", "accent"),
    ]
    pairs += [(f"code-{part}", "sunk") for part in ("keyword", "string", "number", "comment", "name")]
    pairs += [(blame, f"{blame}-soft") for blame in ("none", "model", "infra", "client")]
    for ink, ground in pairs:
        assert page.evaluate(CONTRAST, [ink, ground]) >= 4.5, (ink, ground)


CONTRAST = """([ink, ground]) => {
  const probe = document.body.appendChild(document.createElement("p"));
  const luminance = (name) => {
    probe.style.color = `var(--${name})`;
    const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const [low, high] = [luminance(ink), luminance(ground)].sort((a, b) => a - b);
  probe.remove();
  return (high + 0.05) / (low + 0.05);
}"""


def test_the_live_view_moves_under_load(page: Any, service: Service) -> None:
    page.click("#to-live")
    page.wait_for_selector("#tile-calls")

    def counted() -> int:
        return int(page.inner_text("#tile-calls .note").split()[0])

    with load(service.url, callers=2, per_batch=8):
        before = counted()
        until(lambda: counted() > before + 20, page)
        assert float(page.inner_text("#tile-calls .value").split()[0]) > 0
        until(lambda: "ms" in page.inner_text("#tile-latency .value"), page)
        until(lambda: page.inner_text("#tile-slots .value").startswith(("1", "2")), page)
        assert page.locator("#chart-calls polygon").count() == 4
        page.wait_for_selector("#tenants td:has-text('lab')")
        page.wait_for_selector("#failures .is-model")
        page.get_by_role("button", name="qwen-tool-7b (lab)").click()
        page.wait_for_selector("#steps td")
    assert "embedded" in page.inner_text("#workers")
    assert "tier" in page.inner_text("#tile-tier")


def test_everything_can_be_reached_by_the_keyboard(page: Any) -> None:
    page.evaluate("document.activeElement.blur()")
    reached: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        here = page.evaluate(f"{FOCUSED}.id || {FOCUSED}.className || {FOCUSED}.tagName")
        if here == "code":
            page.keyboard.press("Escape")
        reached.append(here)
    assert {"to-live", "theme-button", "language", "example", "run", "code", "stdin", "limit-wall_s", "echo-value"} <= set(
        reached
    )


def test_a_missing_key_is_asked_for_and_kept_in_this_tab_only(page: Any, service: Service) -> None:
    """A service with keys, seen from the page: 401 without, and the key in the header afterwards."""
    keys: list[str] = []

    def answer(route: Any) -> None:
        key = route.request.headers.get("authorization", "")
        keys.append(key)
        if key == "Bearer exs_right":
            route.continue_()
        else:
            problem = '{"code": "unauthenticated", "title": "A key is needed", "status": 401}'
            route.fulfill(status=401, content_type="application/problem+json", body=problem)

    page.route("**/v1/*", answer)
    page.evaluate("location.hash = '#live'")
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", "exs_right")
    page.keyboard.press("Enter")
    page.wait_for_selector("#tile-calls")
    assert keys[-1] == "Bearer exs_right"
    assert page.evaluate("[sessionStorage.length, Object.keys(localStorage).includes('exec-key')]") == [1, False]
