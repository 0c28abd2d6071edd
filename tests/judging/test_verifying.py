"""Verifications by Math-Verify in its sandbox, and the kinds that need none."""

import asyncio

import pytest
from judging_harness import Court
from math_verify_directly import directly

from exec_client import Verify

# answer ~ truth; the answer in a box or in dollars, so that both ways look at the same text.
PAIRS = r"""
\boxed{\frac{1}{2}} ~ $0.5$
\boxed{\frac12} ~ $\frac{2}{4}$
\boxed{0.333} ~ $\frac{1}{3}$
\boxed{0.333333} ~ $\frac{1}{3}$
\boxed{2x+3} ~ $3+2x$
\boxed{2x+4} ~ $3+2x$
\boxed{(x-1)(x+1)} ~ $x^2-1$
\boxed{(x-1)(x+2)} ~ $x^2-1$
\boxed{\sqrt{8}} ~ $2\sqrt{2}$
\boxed{\sqrt{9}} ~ $2\sqrt{2}$
\boxed{10^3} ~ $1000$
\boxed{1,000} ~ $1000$
\boxed{1{,}000} ~ $1000$
\boxed{50\%} ~ $0.5$
\boxed{50\%} ~ $50$
\boxed{x=5} ~ $5$
\boxed{5=x} ~ $x=5$
\boxed{(1,2)} ~ $(1,2)$
\boxed{(2,1)} ~ $(1,2)$
\boxed{[1,2)} ~ $[1,2)$
\boxed{(1,2)} ~ $[1,2)$
\boxed{\{1,2,3\}} ~ $\{3,2,1\}$
\boxed{\{1,2\}} ~ $\{3,2,1\}$
\boxed{1,2,3} ~ $\{1,2,3\}$
\boxed{\pi} ~ $3.14159$
\boxed{2\pi r} ~ $2 r \pi$
\boxed{\frac{\pi}{4}} ~ $\arctan(1)$
\boxed{e^{i\pi}} ~ $-1$
\boxed{3+4i} ~ $4i+3$
\boxed{3-4i} ~ $4i+3$
\boxed{\log_2 8} ~ $3$
\boxed{\ln e} ~ $1$
\boxed{\sin^2 x + \cos^2 x} ~ $1$
\boxed{\binom{5}{2}} ~ $10$
\boxed{5!} ~ $120$
\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}} ~ $\begin{pmatrix}1&2\\3&4\end{pmatrix}$
\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}} ~ $\begin{pmatrix}1&2\\3&4\end{pmatrix}$
\boxed{\begin{bmatrix}1\\2\end{bmatrix}} ~ $\begin{pmatrix}1\\2\end{pmatrix}$
\boxed{(-\infty,3)} ~ $x<3$
\boxed{x<3} ~ $x<3$
\boxed{x\le 3} ~ $x<3$
\boxed{(-\infty,0)\cup(1,\infty)} ~ $(-\infty,0)\cup(1,\infty)$
\boxed{1 \le x \le 2} ~ $[1,2]$
\boxed{\text{Evelyn}} ~ $\text{Evelyn}$
\boxed{\text{Carla}} ~ $\text{Evelyn}$
\boxed{90^\circ} ~ $90$
\boxed{5\text{ cm}} ~ $5$
\boxed{\$5} ~ $5$
\boxed{-\frac{3}{4}} ~ $-0.75$
\boxed{\frac{-3}{4}} ~ $\frac{3}{-4}$
\boxed{1\frac{1}{2}} ~ $1.5$
\boxed{\sqrt[3]{27}} ~ $3$
\boxed{2^{10}} ~ $1024$
\boxed{|-3|} ~ $3$
\boxed{\lfloor 2.7 \rfloor} ~ $2$
\boxed{7 \pmod{10}} ~ $7$
\boxed{\infty} ~ $\infty$
\boxed{0} ~ $0$
\boxed{-0} ~ $0$
$x^2+2x+1$ ~ $(x+1)^2$
The answer is 42 ~ $42$
The answer is $\frac{7}{8}$. ~ $0.875$
I do not know ~ $42$
\boxed{} ~ $42$
""".strip().splitlines()
ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


def pairs() -> list[tuple[str, str]]:
    return [(answer, truth) for answer, truth in (line.split(" ~ ") for line in PAIRS)]


async def test_verdicts_are_those_of_math_verify_run_directly(here: Court) -> None:
    assert len(PAIRS) >= 60
    direct = [direct.equal for direct in await asyncio.to_thread(directly, pairs())]
    for extract in ("auto", "none"):
        found = await here.client.verify_many(pairs(), extract=extract, wall_s=60, deadline_s=600)
        ours = [verification.equal for verification in found]
        assert [pair for pair, mine, theirs in zip(pairs(), ours, direct, strict=True) if mine != theirs] == []
    assert 30 < sum(direct) < 60
    assert {verification.status for verification in found} == {"ok"}


async def test_expression_that_never_ends_costs_its_own_time_and_no_others(here: Court) -> None:
    items = [Verify(ENDLESS, "$3$", id="endless", wall_s=3)] + [Verify(rf"\boxed{{{n}}}", f"${n}$") for n in range(20)]
    found = await here.client.verify_many(items, deadline_s=60)
    assert (found[0].equal, found[0].status, found[0].blame, found[0].id) == (False, "timeout", "model", "endless")
    assert all(verification.equal for verification in found[1:])
    # With the endless one in one slot, the others share the other one and are done before it is.
    assert max(verification.timings.total_ms for verification in found[1:]) < found[0].timings.total_ms


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        (r"so it is \boxed{1}, no: \boxed{\frac{3}{4}} (see \boxed{)", "0.75", True),
        ("<answer> 1/3 </answer>", r"\frac{1}{3}", True),
        (r"<answer>\sqrt 2</answer>", r"\sqrt{2}", True),
        (r"\boxed{\sqrt{2}}", r"\sqrt 2", True),
        (r"\boxed{2}", r"\sqrt 2", False),
        (r"\boxed{2}", "2x", False),
        (r"\boxed{(2, 1)}", "(1, 2)", False),
    ],
)
async def test_answers_are_found_and_bare_truths_are_read_as_expressions(
    here: Court, answer: str, truth: str, equal: bool
) -> None:
    verification = await here.client.verify(answer, truth)
    assert (verification.equal, verification.status) == (equal, "ok")


async def test_truth_that_is_no_expression_is_the_callers_fault_and_not_scored(here: Court) -> None:
    verification = await here.client.verify(r"\boxed{5}", "nothing to see here")
    assert (verification.equal, verification.status, verification.blame) == (None, "rejected", "client")


async def test_truth_that_never_ends_is_the_callers_fault_and_not_scored(here: Court) -> None:
    verification = await here.client.verify(r"\boxed{5}", "$9^{9^{9^{9}}}$", wall_s=3)
    assert (verification.equal, verification.status, verification.blame) in [
        (None, "timeout", "client"),
        (False, "timeout", "model"),  # parsed without being worked out; comparing did not end
    ]


async def test_answer_is_data_and_never_code(here: Court) -> None:
    hostile = [
        "__import__('os')._exit(0)",
        r"\boxed{__import__('sys').stdout.write('{\"equal\": true}')}",
        "1 + __import__('os').system('echo {}')",
        '\\boxed{"} \n print(1) {"equal": true, "found_truth": true}',
    ]
    for verification in await here.client.verify_many([(answer, "$7$") for answer in hostile]):
        assert verification.equal is False


async def test_kinds_that_need_no_sandbox(here: Court) -> None:
    items = [
        Verify(r"\boxed{Paris}", "Paris", kind="exact"),
        Verify("about $1,234.50", "1234.5", kind="numeric"),
        Verify("The answer is (C).", "C", kind="multiple_choice"),
        Verify("I say B", "C", kind="multiple_choice", id="mine"),
    ]
    found = await here.client.verify_many(items)
    assert [verification.equal for verification in found] == [True, True, True, False]
    assert [verification.index for verification in found] == [0, 1, 2, 3] and found[3].id == "mine"
