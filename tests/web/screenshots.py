"""Takes the pictures of docs/images: all views, light and dark, of a service that is at work.

python tests/web/screenshots.py http://127.0.0.1:8080
"""

import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[1]))

from web_harness import browsing, load

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZE = {"width": 1440, "height": 960}


WALK = "import numpy as np\n\nrng = np.random.default_rng(7)\nwalk = rng.standard_normal(200).cumsum()\nwalk.shape"
PLOT = "import matplotlib.pyplot as plt\nplt.figure(figsize=(6, 2))\nplt.plot(walk - walk.mean())\nwalk = walk[:99]\nlen(walk)"


def show_sessions(page: Any) -> None:
    """A session, three forks of it, one of them forked again and one deleted."""
    page.click("#to-sessions")
    page.select_option("#profile", "data")
    page.click("#start-session")
    run_cell(page, WALK)
    page.fill("#fork-count", "3")
    page.click("#fork")
    choose(page, "1.3")
    page.click("#end-session")
    choose(page, "1.1")
    page.fill("#fork-count", "2")
    page.click("#fork")
    choose(page, "1.1.2")
    run_cell(page, PLOT)
    page.locator("canvas").wait_for()
    run_cell(page, "walk[len(walk)]")


def run_cell(page: Any, code: str) -> None:
    page.wait_for_selector("#run-cell:enabled")
    before = page.locator("#cells > li").count()
    page.fill("#cell-code", code)
    page.click("#run-cell")
    page.locator("#cells > li").nth(before).locator(".ending").wait_for()


def choose(page: Any, name: str) -> None:
    page.locator("#fork-tree .node").filter(has=page.get_by_text(name, exact=True)).click()
    page.locator("#session-name").get_by_text(f"Session {name}", exact=True).wait_for()


def main(url: str) -> None:
    with browsing() as browser:
        for theme in ("light", "dark"):
            page = browser.new_context(viewport=SIZE, color_scheme=theme).new_page()
            page.goto(url)
            page.wait_for_selector("#limit-wall_s")
            page.keyboard.press("Control+Enter")
            page.wait_for_selector("#stdout")
            page.select_option("#example", "Never ends")
            page.keyboard.press("Control+Enter")
            page.wait_for_selector("#verdict.is-model")
            page.screenshot(path=IMAGES / f"playground-{theme}.png")
            page.close()
        for theme in ("light", "dark"):
            page = browser.new_context(viewport=SIZE, color_scheme=theme).new_page()
            page.goto(url)
            page.wait_for_selector("#limit-wall_s")
            show_sessions(page)
            page.screenshot(path=IMAGES / f"sessions-{theme}.png", full_page=True)
            for node in page.locator("#fork-tree .node:not(.is-gone)").all():
                httpx.delete(f"{url}/v1/sessions/{node.get_attribute('data-id')}")
            page.close()
        with load(url):
            pages = {}
            for theme in ("light", "dark"):
                pages[theme] = browser.new_context(viewport=SIZE, color_scheme=theme).new_page()
                pages[theme].goto(f"{url}/#live")
            time.sleep(45)  # until the charts have something to show
            for theme, page in pages.items():
                page.get_by_role("button", name="qwen-tool-7b (lab)").click()
                page.wait_for_selector("#steps table")
                page.screenshot(path=IMAGES / f"live-{theme}.png", full_page=True)


if __name__ == "__main__":
    main(sys.argv[1])
