"""The viewer's page in a real browser, over a run that goes on."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from view_harness import MadeUpRun
from web_harness import SCRIPT, THEMES, WIDTHS, browsing, opened, until

from grpo_roc.view.server import make_viewer

STEPS = 6


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for longer: while playwright is there its event loop is, and tests that bring their own cannot run."""
    with browsing() as browser:
        yield browser


@pytest.fixture
def made(tmp_path: Path) -> MadeUpRun:
    made = MadeUpRun(tmp_path)
    for step in range(STEPS):
        made.write(step)
    return made


@pytest.fixture
def url(made: MadeUpRun) -> Iterator[str]:
    server = make_viewer(made.folder, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.url
    server.shutdown()
    server.server_close()


def shown(browser: Any, url: str, fragment: str = "", **settings: Any) -> Any:
    return opened(browser, url, fragment=f"/{fragment}", ready=".tile", **settings)


def count(page: Any, selector: str) -> int:
    return int(page.locator(selector).count())


def test_new_steps_appear_without_a_reload(browser: Any, url: str, made: MadeUpRun) -> None:
    with shown(browser, url) as page:
        until(lambda: f"step {STEPS} of 40" in page.inner_text("#state"), page)
        made.write(STEPS)
        until(lambda: f"step {STEPS + 1} of 40" in page.inner_text("#state"), page)
        until(lambda: page.locator("#charts svg").first.get_attribute("aria-valuemax") == str(STEPS), page)
        page.click("#to-rollouts")
        until(lambda: page.locator("#list tbody tr").first.locator("td").first.inner_text() == str(STEPS), page)
        made.write(STEPS + 1)
        until(lambda: page.locator("#list tbody tr").first.locator("td").first.inner_text() == str(STEPS + 1), page)


def test_new_steps_do_not_move_the_list_under_a_reader(browser: Any, url: str, made: MadeUpRun) -> None:
    with shown(browser, url, "#rollouts") as page:
        page.locator("#list tbody a").nth(2).click()
        page.wait_for_selector(".turn.model")
        before = page.inner_text("#list")
        made.write(STEPS)
        page.wait_for_selector("#newer:not([hidden])")
        assert page.inner_text("#list") == before
        page.click("#newer")
        until(lambda: page.inner_text("#list") != before, page)


def test_filters_are_in_the_address_and_leave_what_they_name(browser: Any, url: str) -> None:
    with shown(browser, url, "#rollouts") as page:
        page.select_option("#filters [name=reward]", "wrong")
        page.select_option("#step", "3")
        until(lambda: {*page.locator("#list tbody td:nth-child(4)").all_inner_texts()} == {"wrong"}, page)
        until(lambda: {*page.locator("#list tbody td:nth-child(1)").all_inner_texts()} == {"3"}, page)
        wanted = page.locator("#list tbody a").first.inner_text()
        page.fill("#filters [name=problem]", wanted)
        until(lambda: {*page.locator("#list tbody td:nth-child(3)").all_inner_texts()} == {wanted}, page)
        found = page.inner_text("#found")
        page.reload()
        until(lambda: page.inner_text("#found") == found, page)
        assert page.input_value("#filters [name=problem]") == wanted and page.input_value("#step") == "3"
        page.click("#reset")
        until(lambda: page.inner_text("#found") == f"{64 * STEPS} rollouts", page)


def test_pages_are_turned_and_neighbours_opened(browser: Any, url: str) -> None:
    with shown(browser, url, "#rollouts") as page:
        page.click("#page-on")
        until(lambda: "page 2 of 8" in page.inner_text("#page"), page)
        page.locator("#list tbody a").first.click()
        page.wait_for_selector("#list tbody tr:first-child[aria-current]")
        page.get_by_role("link", name="Next →").click()
        page.wait_for_selector("#list tbody tr:nth-child(2)[aria-current]")


def test_a_rollout_shows_masks_calls_and_why_it_was_kept_or_dropped(browser: Any, url: str, made: MadeUpRun) -> None:
    rollouts = made.rollouts(3)
    one = next(one for one in rollouts if one.outcomes == ["error", "ok"] and one.statuses[0] == "runtime_error")
    with shown(browser, url, f"#rollouts?open=3.{one.group}.{one.sample}") as page:
        page.wait_for_selector(".turn.model")
        assert (count(page, ".turn.model"), count(page, ".turn.tool"), count(page, ".call")) == (3, 2, 2)
        assert page.locator(".call .tag").all_inner_texts() == ["error: runtime_error", "ok"]
        assert all("not learned" in text for text in page.locator(".turn.tool h4").all_inner_texts())
        assert page.locator(".call pre").last.inner_text() == f"print({one.problem})"
        assert count(page, ".strip a") == 16 and count(page, ".strip a[aria-current]") == 1
        assert f"{one.group}" in page.inner_text("#rollout header") and "rollouts of this group" in page.inner_text(".why")
        kept = page.locator(".strip a.kept")
        kept.first.click()
        until(lambda: page.locator(".why .tag").inner_text() == "Kept", page)
        assert "learned" in page.locator(".turn.model h4").first.inner_text()


def test_the_tokens_are_read_by_the_slider_and_the_pointer(browser: Any, url: str) -> None:
    with shown(browser, url, "#rollouts?open=3.1.2") as page:
        page.wait_for_selector(".turn.model")
        page.focus(".reader input")
        page.keyboard.press("ArrowRight")
        until(lambda: "token 2 of" in page.inner_text(".told") and "nats" in page.inner_text(".told"), page)
        assert page.locator("pre span.at").count() == 1
        page.locator(".turn.tool pre span").nth(4).hover()
        until(lambda: "observed" in page.inner_text(".told"), page)
        coloured = count(page, "pre.generated span[class^=e]")
        page.get_by_role("radio", name="None").check()
        assert 1 < coloured > count(page, "pre.generated span[class^=e]")


def test_a_chart_is_read_by_arrow_keys_and_enter_shows_the_steps_rollouts(browser: Any, url: str) -> None:
    with shown(browser, url) as page:
        page.wait_for_selector("#charts polyline")
        page.locator("#charts svg").nth(1).focus()
        for key in ("Home", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        assert page.locator("#charts figcaption .hint").all_inner_texts() == ["step 2"] * 8
        page.keyboard.press("Enter")
        until(lambda: {*page.locator("#list tbody td:nth-child(1)").all_inner_texts()} == {"2"}, page)
        page.locator("#list tbody a").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_selector("#list tbody tr:nth-child(2)[aria-current]")


def test_markup_of_problems_and_programs_stays_text(browser: Any, url: str, made: MadeUpRun) -> None:
    rollouts = made.rollouts(STEPS)
    for one in rollouts:
        one.problem, one.truth, one.statuses = SCRIPT, SCRIPT, [SCRIPT] * len(one.statuses)
        one.prompt, one.ids = made.codec.ids(SCRIPT), [*one.ids, *made.codec.ids(SCRIPT)]
        added = len(one.ids) - len(one.mask)
        for part, value in ((one.mask, 1), (one.logprobs, -1.0), (one.entropies, 1.0)):
            part += [value] * added
    made.write(STEPS, rollouts)
    with shown(browser, url, f"#rollouts?open={STEPS}.1.2") as page:
        page.wait_for_selector(".turn.model")
        page.click("summary")
        texts = [
            page.inner_text(part) for part in ("#list tbody a >> nth=0", "#rollout header h2", "details pre", "#rollout dl")
        ]
        assert all(SCRIPT in text for text in texts) and SCRIPT in page.locator("pre.generated").last.inner_text()
        assert count(page, "#rollout img, #rollout b:has-text('bold')") == 0 and "broken" not in page.title()


def test_an_empty_run_and_a_lost_server_are_said(browser: Any, url: str, made: MadeUpRun) -> None:
    made = MadeUpRun(made.folder)
    with shown(browser, url, "#rollouts", expected="ERR_INTERNET_DISCONNECTED") as page:
        until(lambda: "No rollout is recorded yet" in page.inner_text("#list"), page)
        made.write(0)
        until(lambda: count(page, "#list tbody tr") == 50, page)
        page.context.set_offline(True)
        page.wait_for_selector("#banner:not([hidden])")
        assert "No answer" in page.inner_text("#banner")
        page.context.set_offline(False)
        page.wait_for_selector("#banner", state="hidden")


VIEWS = {"curves": ("#curves", "#charts polyline"), "rollouts": ("#rollouts?open=3.1.2", ".turn.tool")}


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(browser: Any, url: str, width: int) -> None:
    for fragment, part in VIEWS.values():
        with shown(browser, url, fragment, viewport={"width": width, "height": WIDTHS[width]}) as page:
            page.wait_for_selector(part)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if "rollouts" in fragment:
                assert page.locator("#list").evaluate("(list) => list.scrollWidth <= list.clientWidth")


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(browser: Any, url: str, view: str, width: int, theme: str) -> None:
    fragment, part = VIEWS[view]
    with shown(browser, url, fragment, viewport={"width": width, "height": WIDTHS[width]}, color_scheme=theme) as page:
        page.wait_for_selector(part)
        found = Axe().run(page).response
        assert found["passes"]
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []
