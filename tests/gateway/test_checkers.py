"""Each way to compare, on texts that somebody will print one day."""

import asyncio
import time

import pytest

from exec_service.judging.checkers import close, difference, lines, number, same_value, tokens
from exec_wire.messages.judging import Checker

EXACT, TOKENS, LINES, FLOAT = (Checker(kind) for kind in ("exact", "tokens", "lines", "float"))  # type: ignore[arg-type]
STRICT = Checker("float", abs_tol=0.0, rel_tol=0.0)
MEGABYTE = 1 << 20
INFINITIES = (float("inf"), float("-inf"))


@pytest.mark.parametrize(
    ("checker", "output", "expected", "told"),
    [
        (EXACT, "a\n", "a\n", ""),
        (EXACT, "a", "a\n", "the output differs"),
        (EXACT, "a\r\n", "a\n", "the output differs"),
        (EXACT, "", "", ""),
        (EXACT, "é", "e\u0301", "the output differs"),
        (TOKENS, " 1\t2\r\n\n3 ", "1 2 3", ""),
        (TOKENS, "1 2", "1 2 3", "the output ends before token 3"),
        (TOKENS, "1 2 3 4", "1 2 3", "the output goes on after token 3"),
        (TOKENS, "1 02 3", "1 2 3", "token 2 differs"),
        (TOKENS, "", "", ""),
        (TOKENS, " \n ", "", ""),
        (TOKENS, "", "x", "the output ends before token 1"),
        (TOKENS, "x", "", "the output goes on after token 0"),
        (TOKENS, "Yes", "yes", "token 1 differs"),
        (TOKENS, "1.0", "1", "token 1 differs"),
        (LINES, "a \nb\t\n\n\n", "a\nb", ""),
        (LINES, "a\r\nb\r\n", "a\nb\n", ""),
        (LINES, "a\n\nb", "a\nb", "line 2 differs"),
        (LINES, " a", "a", "line 1 differs"),
        (LINES, "a  b", "a b", "line 1 differs"),
        (LINES, "\n\na", "a", "line 1 differs"),
        (LINES, "a", "a\nb", "the output ends before line 2"),
        (LINES, "a\nb\nc", "a\nb", "the output goes on after line 2"),
        (LINES, "\n \n\t\n", "", ""),
        (FLOAT, "1.0000001 x", "1 x", ""),
        (FLOAT, "1.1 x", "1 x", "token 1 differs"),
        (FLOAT, "1 y", "1 x", "token 2 differs"),
        (FLOAT, "1e3 -0 +5", "1000 0 5.0", ""),
        (FLOAT, ".5 5.", "0.5 5", ""),
        (FLOAT, "1000000.9", "1000000", ""),  # relative to what was expected
        (FLOAT, "1000002", "1000000", "token 1 differs"),
        (FLOAT, "0.0000009", "0", ""),
        (FLOAT, "0.0000011", "0", "token 1 differs"),
        (FLOAT, "nan", "NaN", ""),
        (FLOAT, "nan", "0", "token 1 differs"),
        (FLOAT, "0", "nan", "token 1 differs"),
        (FLOAT, "inf", "Infinity", ""),
        (FLOAT, "-inf", "inf", "token 1 differs"),
        (FLOAT, "1e308", "inf", "token 1 differs"),
        (FLOAT, "inf", "1e308", "token 1 differs"),
        (FLOAT, "1e999", "1e998", "token 1 differs"),
        (FLOAT, "1e999", "inf", "token 1 differs"),
        (FLOAT, "1e999", "1e999", ""),
        (FLOAT, "-1.7e308", "1.7e308", "token 1 differs"),
        (FLOAT, "1_000", "1000", "token 1 differs"),
        (FLOAT, "0x10", "16", "token 1 differs"),
        (FLOAT, "\u0661", "1", "token 1 differs"),
        (FLOAT, "1,5", "1.5", "token 1 differs"),
        (FLOAT, "1 2", "1", "the output goes on after token 1"),
        (STRICT, "0.30000000000000004", "0.3", "token 1 differs"),
        (STRICT, "3.0", "3", ""),
    ],
)
async def test_difference(checker: Checker, output: str, expected: str, told: str) -> None:
    assert await difference(checker, output, expected) == told


async def test_what_is_told_of_a_difference_does_not_give_the_answer_away() -> None:
    for checker in (EXACT, TOKENS, LINES, FLOAT):
        assert "secret" not in await difference(checker, "public", "secret")


def test_number_reads_decimal_notation_only() -> None:
    assert [number(text) for text in ("1", "-1.5e3", "+.5", "5.", "inf", "-Infinity")] == [1, -1500, 0.5, 5, *INFINITIES]
    assert [number(text) for text in ("", ".", "e5", "1e", "--1", "0x1", "1_0", "one", "1" * 401, "1e400", "²", "\u0661")] == [
        None
    ] * 12


def test_close_is_relative_to_the_expected_number() -> None:
    assert close(101, 100, 0, 0.01) and not close(100, 101.1, 0, 0.01)
    assert close(0.1, 0, 0.1, 0) and not close(0.2, 0, 0.1, 1)


def test_tokens_and_lines_are_taken_as_needed() -> None:
    assert next(tokens("a " * MEGABYTE)) == "a"
    assert next(lines("a\n" * MEGABYTE)) == "a"
    assert list(lines("a\n\n b \n\n")) == ["a", "", " b"]


@pytest.mark.parametrize(
    ("checker", "output", "expected"),
    [
        (TOKENS, "1 " * (MEGABYTE // 2), "1 " * (MEGABYTE // 2 - 1) + "2"),
        (FLOAT, "1.0 " * (MEGABYTE // 4), "1.00 " * (MEGABYTE // 5)),
        (LINES, "\n" * MEGABYTE, "\n" * MEGABYTE + "x"),
        (LINES, "a\n" * (MEGABYTE // 2), "a \n" * (MEGABYTE // 2)),
        (FLOAT, "1" * MEGABYTE, "2" * MEGABYTE),
    ],
    ids=["tokens", "floats", "empty lines", "lines", "one long number"],
)
async def test_large_outputs_do_not_hold_the_event_loop(checker: Checker, output: str, expected: str) -> None:
    comparing = asyncio.create_task(difference(checker, output, expected))
    longest, turn = 0.0, time.thread_time()  # of this thread's own CPU time: the machine may be busy with others
    while not comparing.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, turn = max(longest, now - turn), now
    assert longest < 0.1


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        (None, 0, False),
        ("1", 1, False),
        ([1, [2, {"a": None}]], [1.0, [2, {"a": None}]], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, [["a", 1]], False),
        (10**30, 10**30 + 1, False),
        (2**53 + 1, 2.0**53, False),
        (10**400, 1e308, False),
        (0.1 + 0.2, 0.3, False),
        ("", "", True),
        ([], {}, False),
    ],
)
async def test_json_values_are_compared_as_json(got: object, wanted: object, same: bool) -> None:
    assert await same_value(TOKENS, got, wanted) is same


async def test_json_numbers_are_tolerated_by_the_float_checker_only() -> None:
    assert await same_value(FLOAT, [0.1 + 0.2, {"x": 1.0000001}], [0.3, {"x": 1}])
    assert await same_value(FLOAT, float("nan"), float("nan"))
    assert not await same_value(FLOAT, True, 1.0)
    assert not await same_value(FLOAT, 10**400, 1.0)


async def test_deep_values_do_not_break_the_comparison() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert not await same_value(TOKENS, deep, [[]])
