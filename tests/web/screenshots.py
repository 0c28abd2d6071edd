"""Takes the pictures of docs/images: every view of a service that is at work, at three widths, light and dark.

python tests/web/screenshots.py http://127.0.0.1:8080
"""

import io
import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / ".sandbox-packages"))  # Pillow

from PIL import Image
from web_harness import THEMES, WIDTHS, browsing, load, write

IMAGES = Path(__file__).parents[2] / "docs" / "images"
EXACT, MIXED = 192, 64  # colours of a picture's palette; it halves the size

WALK = "import numpy as np\n\nrng = np.random.default_rng(7)\nwalk = rng.standard_normal(200).cumsum()\nwalk.shape"
PLOT = "import matplotlib.pyplot as plt\nplt.figure(figsize=(6, 2))\nplt.plot(walk - walk.mean())\nwalk = walk[:99]\nlen(walk)"
ENDLESS = {"code": "while True: pass", "limits": {"wall_s": 1}, "tags": {"run": "qwen-tool-7b", "step": 0}, "tenant": "lab"}


def show_playground(page: Any, url: str) -> None:
    """One result, and the result of a program that wrote a file."""
    page.goto(url)
    page.wait_for_selector("#limit-wall_s", state="attached")
    page.click("#run")
    page.wait_for_selector("#stdout")
    page.select_option("#example", "Writes a file")
    page.click("#run")
    page.wait_for_selector("#fetched")


def show_sessions(page: Any, url: str) -> None:
    """A session, three forks of it, one of them forked again and one deleted."""
    page.goto(f"{url}/#sessions")
    page.wait_for_selector("#limit-wall_s", state="attached")
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
    write(page, "#cell-code", code)
    page.click("#run-cell")
    page.locator("#cells > li").nth(before).locator(".ending").wait_for()


def choose(page: Any, name: str) -> None:
    page.locator("#fork-tree .node").filter(has=page.get_by_text(name, exact=True)).click()
    page.locator("#session-name").get_by_text(f"Session {name}", exact=True).wait_for()


def end_sessions(url: str) -> None:
    for session in httpx.get(f"{url}/v1/sessions").json()["sessions"]:
        httpx.delete(f"{url}/v1/sessions/{session['id']}")


def show_run(page: Any) -> None:
    page.get_by_role("button", name="qwen-tool-7b (lab)").click()
    page.wait_for_selector("#steps table")


def save(page: Any, view: str, size: tuple[int, str]) -> None:
    page.evaluate("document.activeElement.blur()")
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture = picture.quantize(palette=palette(picture), dither=Image.Dither.NONE)
    picture.save(IMAGES / f"{view}-{size[0]}-{size[1]}.png", optimize=True)


def palette(picture: Any) -> Any:
    """The most frequent colours as they are, which are those of surfaces, and a selection of the others."""
    frequent = sorted(picture.getcolors(1 << 24), reverse=True)[:EXACT]
    others = picture.quantize(MIXED, Image.Quantize.MAXCOVERAGE).getpalette()[: 3 * MIXED]
    colours = Image.new("P", (1, 1))
    colours.putpalette([part for _, colour in frequent for part in colour] + others)
    return colours


def main(url: str) -> None:
    with browsing() as browser:
        pages = {}
        for width, height in WIDTHS.items():
            for theme in THEMES:
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
                pages[width, theme] = context.new_page()
        for size, page in pages.items():
            show_playground(page, url)
            save(page, "playground", size)
            show_sessions(page, url)
            save(page, "sessions", size)
            end_sessions(url)
        with load(url):
            for page in pages.values():
                page.goto(f"{url}/#live")
            time.sleep(45)  # until the charts have something to show
            httpx.post(f"{url}/v1/run", json=ENDLESS, timeout=60)
            for size, page in pages.items():
                show_run(page)
                save(page, "live", size)


if __name__ == "__main__":
    main(sys.argv[1])
