"""Takes the pictures of docs/images: both views, light and dark, of a service that is at work.

python tests/web/screenshots.py http://127.0.0.1:8080
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from web_harness import browsing, load

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZE = {"width": 1440, "height": 960}


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
