"""Every view has no findings of axe-core, in both themes, on a phone and on a screen."""

from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from service_harness import Service
from web_harness import THEMES, WIDTHS, load, opened, until


def show_start(page: Any, service: Service) -> None:
    page.wait_for_selector("#nothing-yet")


def show_failure(page: Any, service: Service) -> None:
    page.select_option("#example", "Fails")
    page.click("#run")
    page.wait_for_selector("#stderr")


def show_files(page: Any, service: Service) -> None:
    page.set_input_files("#upload", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    page.fill("#fetch-files", "a.txt, missing")
    page.click("#run")
    page.wait_for_selector("#fetched")


def show_refusal(page: Any, service: Service) -> None:
    page.evaluate("document.querySelector('#limit-processes').removeAttribute('max')")
    page.evaluate("document.querySelector('#limits').open = true")
    page.fill("#limit-processes", "99999")
    page.click("#run")
    page.wait_for_selector("#verdict.is-client")


def show_no_session(page: Any, service: Service) -> None:
    page.click("#to-sessions")
    page.wait_for_selector("#no-session")


def show_sessions(page: Any, service: Service) -> None:
    page.click("#to-sessions")
    page.click("#start-session")
    page.wait_for_selector("#notebook:not([hidden])")
    page.click("#run-cell")
    page.wait_for_selector(".ending")
    page.click("#fork")
    until(lambda: page.locator("#fork-tree .node").count() == 3, page)


def show_live(page: Any, service: Service) -> None:
    with load(service.url, callers=1, per_batch=8):
        page.click("#to-live")
        page.get_by_role("button", name="qwen-tool-7b (lab)").click()
        page.wait_for_selector("#steps td")


def show_key_dialog(page: Any, service: Service) -> None:
    page.route("**/v1/info", lambda route: route.fulfill(status=401, json={"title": "A key is needed", "status": 401}))
    page.wait_for_selector("#key-dialog[open]")


VIEWS: dict[str, list[Callable[[Any, Service], None]]] = {
    "playground": [show_start, show_failure, show_files, show_refusal],
    "sessions": [show_no_session, show_sessions],
    "live": [show_live],
    "key dialog": [show_key_dialog],
}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(browser: Any, service: Service, view: str, width: int, theme: str) -> None:
    size = {"width": width, "height": WIDTHS[width]}
    with opened(browser, service.url, viewport=size, color_scheme=theme) as page:
        for show in VIEWS[view]:
            show(page, service)
            assert findings(page) == [], show.__name__
    for session in service.http.get("/v1/sessions").json()["sessions"]:
        service.http.delete(f"/v1/sessions/{session['id']}")


def test_axe_finds_nothing_with_the_plain_editor(browser: Any, service: Service) -> None:
    with opened(browser, service.url, plain=True) as page:
        assert findings(page) == []


def findings(page: Any) -> list[tuple[str, list[str]]]:
    found = Axe().run(page).response
    assert found["passes"]
    return [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]]
