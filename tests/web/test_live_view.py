"""The live view at every width, read with eyes, with the keyboard and with a screen reader."""

from collections.abc import Iterator
from typing import Any

import pytest
from service_harness import Service
from web_harness import FOCUSED, WIDTHS, load, opened, until

each_width = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture
def page(browser: Any, service: Service) -> Iterator[Any]:
    with opened(browser, service.url, fragment="/#live") as page:
        page.wait_for_selector("#tile-calls")
        yield page


def test_a_single_second_with_calls_is_seen_in_the_latency_chart(page: Any, service: Service) -> None:
    page.wait_for_timeout(2000)
    service.run("print(1)")
    until(lambda: page.locator("#chart-latency circle").count() == 2, page)  # p50 and p99
    assert page.locator("#chart-latency circle").first.bounding_box()["width"] >= 5


FAILURES = {
    "still running at its limit of wall time": {"code": "while True: pass", "limits": {"wall_s": 0.5}},
    "used up its CPU time": {"code": "while True: pass", "limits": {"cpu_s": 0.5}},
    "needed more memory than its limit": {"code": "x = bytearray(1 << 30)", "limits": {"memory_mb": 64}},
    "printed more than its limit": {"code": "while True: print('x' * 5000)", "limits": {"output_kb": 1}},
    "exit code 3": {"code": "raise SystemExit(3)"},
}


def test_the_reason_of_each_failure_is_named(page: Any, service: Service) -> None:
    for call in FAILURES.values():
        service.run(**call)
    until(lambda: all(reason in page.inner_text("#failures") for reason in FAILURES), page)
    rows = page.locator("#failures tbody tr").all_inner_texts()
    assert len(rows) == len(FAILURES) and all(any(reason in row for reason in FAILURES) for row in rows)


@each_width
def test_nothing_is_wider_than_the_window(browser: Any, service: Service, width: int) -> None:
    with opened(browser, service.url, viewport={"width": width, "height": WIDTHS[width]}) as page:
        page.click("#run")
        page.wait_for_selector("#verdict")
        for view, part in (("playground", "#verdict"), ("sessions", "#start-session"), ("live", "#chart-calls svg")):
            page.click(f"#to-{view}")
            page.wait_for_selector(part)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view


@each_width
def test_the_cards_fill_the_width(browser: Any, service: Service, width: int) -> None:
    with opened(browser, service.url, fragment="/#live", viewport={"width": width, "height": WIDTHS[width]}) as page:
        page.wait_for_selector("#chart-calls svg")
        rows = page.evaluate(ROWS)
        assert [row for row in rows if abs(row["right"] - row["edge"]) > 1] == []
        least = page.evaluate("Math.min(...[...document.querySelectorAll('.grid > .panel')].map((card) => card.clientWidth))")
        assert least >= min(330, width * 0.85)


# The cards from top to bottom: where each row ends, and where it should.
ROWS = """() => {
  const rows = new Map();
  for (const card of document.querySelectorAll(".grid > .panel, .tile")) {
    const { top, right } = card.getBoundingClientRect();
    const row = Math.round(top);
    rows.set(row, Math.max(rows.get(row) ?? 0, right));
  }
  const edge = document.querySelector(".grid").getBoundingClientRect().right;
  return [...rows].map(([top, right]) => ({ top, right, edge }));
}"""


def test_the_charts_are_read_by_arrow_keys(page: Any) -> None:
    chart = page.locator("#chart-calls svg")
    chart.focus()
    for key, words in (("End", "1 s ago"), ("ArrowLeft", "2 s ago"), ("Home", "120 s ago"), ("ArrowRight", "119 s ago")):
        page.keyboard.press(key)
        assert chart.get_attribute("aria-valuetext").startswith(f"{words}: ")
        assert page.inner_text("#chart-calls .read-out").startswith(f"{words}: ")
    page.keyboard.press("Tab")
    assert "ago" not in page.inner_text("#chart-calls .read-out")


def test_the_focus_stays_on_a_run_while_the_tables_are_refreshed(page: Any, service: Service) -> None:
    with load(service.url, callers=1, per_batch=8):
        button = page.get_by_role("button", name="qwen-tool-7b (lab)")
        button.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("#steps td")
        before = page.inner_text("#tile-calls .note")
        until(lambda: page.inner_text("#tile-calls .note") != before, page)
        assert page.evaluate(f"{FOCUSED}.textContent") == "qwen-tool-7b (lab)"
        until(lambda: button.get_attribute("aria-pressed") == "true", page)
