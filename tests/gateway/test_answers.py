"""What of a model's text is its answer, and the kinds that are compared without a sandbox."""

import time

import pytest

from exec_service.judging.answers import NotComparable, as_latex, equal, extract, read_choices, read_number
from exec_wire.messages.judging import Verify


@pytest.mark.parametrize(
    ("how", "text", "found"),
    [
        ("auto", r"so \boxed{5}", "5"),
        ("auto", r"\boxed{1} then \boxed{ 2 }", "2"),
        ("auto", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("auto", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("auto", r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("auto", r"\boxed{a\\} b", r"a\\"),
        ("auto", r"\boxed{1} and then \boxed{2", "1"),
        ("auto", r"\boxed{\boxed{3}}", "3"),
        ("auto", r"<answer>4</answer> \boxed{5}", "5"),
        ("answer", r"<answer>4</answer> \boxed{5}", "4"),
        ("auto", "<answer>1</answer><answer> 2\n</answer>", "2"),
        ("auto", "<answer>1</answer><answer>2", "1"),
        ("auto", "just text", "just text"),
        ("auto", "", ""),
        ("none", r"\boxed{5}", r"\boxed{5}"),
        ("boxed", "5", None),
        ("boxed", r"\boxed{5", None),
        ("boxed", r"\boxed{" + "x" * 20_000 + "}", None),
        ("answer", "</answer>5<answer>", None),
    ],
)
def test_extraction(how: str, text: str, found: str | None) -> None:
    extracted = extract(text, how)
    assert (extracted.text if extracted is not None else None) == found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("-7", -7),
        ("− 3", -3),  # noqa: RUF001
        ("1,234,567", 1234567),
        ("$1,234.50", 1234.5),
        (r"\$5", 5),
        ("50%", 50),
        (r"50\%", 50),
        (r"\frac{1}{4}", 0.25),
        (r"-\frac{1}{4}", -0.25),
        (r"\dfrac14", 0.25),
        ("3/4", 0.75),
        (r"3 \times 10^{5}", 300_000),
        ("2.5e-3", 0.0025),
        ("It is 41, no, 42.", 42),
        (r"5\text{ cm}", 5),
        (".5", 0.5),
        ("007", 7),
        ("1" * 300, int("1" * 300)),
        ("1" * 500, None),
        ("1e999", None),
        ("1/0", None),
        ("none", None),
        ("", None),
    ],
)
def test_numbers_are_read(text: str, number: float | None) -> None:
    assert read_number(text) == number


@pytest.mark.parametrize(
    ("answer", "truth", "tolerances", "same"),
    [
        ("1000000", "1000001", {}, False),  # whole numbers exactly
        ("1000000.0", "1000001", {}, True),
        ("0.3333333", "1/3", {}, True),
        ("0.333", "1/3", {}, False),
        ("0.333", "1/3", {"abs_tol": 0.01}, True),
        ("99", "100", {"rel_tol": 0.01}, True),
        ("98", "100", {"rel_tol": 0.01}, False),
        ("0.1", "0", {"rel_tol": 1.0}, False),
        ("nothing", "5", {}, False),
        ("1" * 390, "1" * 389 + "2", {}, False),
        ("1" * 390, "1" * 389 + "2", {"rel_tol": 0.1}, False),  # beyond what a float holds, only the same is equal
        ("12345678901234567891", "12345678901234567890", {}, False),
    ],
)
def test_numbers_are_compared(answer: str, truth: str, tolerances: dict[str, float], same: bool) -> None:
    assert equal(Verify(answer, truth, kind="numeric", **tolerances), answer) is same  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("C", "C"),
        ("c", "C"),
        ("(B)", "B"),
        ("**D**", "D"),
        (r"\text{(A)}", "A"),
        (r"\textbf{E}.", "E"),
        ("A, C", "AC"),
        ("A and C", "AC"),
        ("BD", "BD"),
        ("The answer is (B), because A is wrong", "B"),
        ("Answer: C\nthank you", "C"),
        ("First I thought (A), now (D)", "D"),
        ("some reasoning\nB", "B"),
        ("I have a bad idea", ""),
        ("", ""),
        ("bad", ""),
    ],
)
def test_choices_are_read(text: str, letters: str) -> None:
    assert read_choices(text) == set(letters)


@pytest.mark.parametrize(("kind", "truth"), [("numeric", "none"), ("multiple_choice", "Z"), ("multiple_choice", "")])
def test_truth_of_another_kind_is_the_callers_fault(kind: str, truth: str) -> None:
    with pytest.raises(NotComparable):
        equal(Verify("5", truth, kind=kind), "5")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\sqrt 2", True),
        ("2x", True),
        ("(1, 2]", True),
        ("3, 5", True),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", True),
        (r"\text{no solution}", True),
        ("$2x$", False),
        (r"\(2x\)", False),
        (r"\boxed{2x}", False),
        ("1,000", False),
        ("1/3", False),
        ("50%", False),
        ("The answer is 42", False),
    ],
)
def test_bare_expressions_are_put_into_a_box(text: str, boxed: bool) -> None:
    assert as_latex(text) == (f"\\boxed{{{text}}}" if boxed else text)


@pytest.mark.parametrize(
    "unit", ["\\boxed{", "{", "}", "answer ", " ", "\\frac{", "A ", "A, ", "1,", "1 ", "\\text{", "((", "1/", "e", "\\"]
)
def test_no_text_takes_long(unit: str) -> None:
    for head in ("", "\\boxed{", "<answer>", "answer is", "\\frac{"):
        text = head + unit * ((1 << 20) // len(unit))
        began = time.thread_time()
        for how in ("auto", "boxed", "answer"):
            extract(text, how)
        read_number(text)
        read_choices(text)
        as_latex(text[:32_768])
        assert time.thread_time() - began < 0.5
