"""The toy: arithmetic that a tiny model cannot do in its head, but with one tool call.

Demonstrations teach only the format and the tool, and they are sloppy on purpose: bugs that are repaired, guesses, repeated
calls, two answers. RL has to remove these.

All lengths vary (wording, error texts, filler around them), because a model that sees fixed distances copies operands by
distance and fails at the first traceback of another length.
"""

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal

from exec_wire.messages.calls import cut_middle
from grpo_roc import chat
from grpo_roc.tasks.base import Problem, Segment, Task

WORDINGS = (
    "Compute {}.",
    "What is {}?",
    "Please find the value of {} for me.",
    "I need {} as a whole number.",
    "Here is a problem. How much is {}? Think before you answer.",
    "A clerk has to work out {} today, and has no machine. Tell the result.",
)
# The digit is the hundred of an operand: 5 means 500 to 599. The model can find an operand by its value instead of its place,
# which two or three layers learn in minutes.
FORMS = {"mod": "{5}*{7}%{9}", "sum": "({5}*{7}+{6})%{9}", "long": "{5}*{7}%{9}+{6}//{8}-{4}"}
Split = Literal["train", "validation", "test"]
AFTER_ERROR = {"retry": 0.93, "bug": 0.05, "guess": 0.02}
AFTER_RESULT = {"answer": 0.72, "check": 0.14, "twice": 0.14}
BUGS = ("paren", "name", "json", "operand")
_WORDS = "the file code line value error note tool warn hint this is not of a to number cache path table again later".split()


def make_problem(rng: random.Random, kinds: Sequence[str], split: Split) -> Problem:
    """The splits have no expression in common."""
    while True:
        code = FORMS[rng.choice(kinds)].format(*(rng.randrange(100 * hundred, 100 * hundred + 100) for hundred in range(10)))
        if _split(code) == split:
            return Problem(code, rng.choice(WORDINGS).format(code), str(eval(code)))  # digits and operators from FORMS


def _split(code: str) -> Split:
    number, digit = divmod(zlib.crc32(code.encode()), 10)
    if digit:
        return "train"
    return "test" if number % 4 else "validation"


class Arith(Task):
    def _make_pool(self) -> Sequence[Problem]:
        if unknown := set(self._settings.problems) - set(FORMS):
            raise ValueError(f"task.problems: unknown kind {', '.join(unknown)}; known kinds: {', '.join(FORMS)}")
        rng = random.Random("pool")
        return [make_problem(rng, self._settings.problems, "train") for _ in range(self._settings.pool)]

    def batch(self, seed: int, step: int, count: int) -> list[Problem]:
        if self.pool:
            return super().batch(seed, step, count)
        rng = random.Random(f"rl:{seed}:{step}")
        return [make_problem(rng, self._settings.problems, "train") for _ in range(count)]

    def benchmarks(self, count: int) -> dict[str, list[Problem]]:
        rng = random.Random("heldout")
        return {"heldout": [make_problem(rng, self._settings.problems, "test") for _ in range(count)]}

    def validation(self) -> list[Problem]:
        rng = random.Random("validation")
        return [make_problem(rng, self._settings.problems, "validation") for _ in range(self._settings.val_problems)]

    def demonstrations(self, seed: int, step: int, count: int) -> list[list[Segment]]:
        rng = random.Random(f"sft:{seed}:{step}")
        return [list(self._demonstrate(rng)) for _ in range(count)]

    @property
    def texts(self) -> list[str]:
        rng = random.Random(0)
        errors = [error_text(rng, bug, "1*2%3+4//5-6") for bug in (*BUGS, "zero", "time") for _ in range(4)]
        turns = [chat.prompt(wording.format("1*2%3"), "short", "<reason>") for wording in WORDINGS]
        words = [space + word for word in _WORDS for space in ("", " ")]
        return [*errors, *turns, chat.observation(["1"], "<reason>"), *THOUGHTS.values(), "print pritn", *words]

    def _demonstrate(self, rng: random.Random) -> Iterator[Segment]:
        problem = make_problem(rng, self._settings.problems, "train")
        yield Segment(chat.prompt(problem.text, self._chat.system, self._chat.opening), False)
        bug_share, guess_share = self._settings.first_bug, self._settings.first_guess
        action = _draw(rng, {"call": 1 - bug_share - guess_share, "bug": bug_share, "guess": guess_share})
        for _ in range(3):
            if action == "guess":
                yield _learned(THOUGHTS["answer"] + answer(str(rng.randint(0, 998))))
                return
            bug = rng.choice(BUGS) if action == "bug" else ""
            thought = {"retry": "fix", "check": "check"}.get(action, "run")
            yield _learned(THOUGHTS[thought] + call_text(problem.id, bug))
            text = cut_middle(error_text(rng, bug, problem.id), self._chat.observation_chars) if bug else problem.answer
            yield Segment(chat.observation([text], self._chat.opening), False)
            action = _draw(rng, AFTER_ERROR if bug else AFTER_RESULT)
            if action in ("answer", "twice"):
                break
        else:
            action = "answer" if not bug else "guess"
        given = problem.answer if action != "guess" else str(rng.randint(0, 998))
        yield _learned(THOUGHTS["answer"] + answer(given) * (2 if action == "twice" else 1))


THOUGHTS = {"run": " run</reason>", "fix": " fix</reason>", "check": " check</reason>", "answer": " done</reason>"}


def _learned(text: str) -> Segment:
    return Segment(text + chat.END, True)


def answer(number: str) -> str:
    return f"<answer>\\boxed{{{number}}}</answer>"


def call_text(expression: str, bug: str = "") -> str:
    code = {"paren": f"print({expression}", "name": f"pritn({expression})", "operand": f"print({expression}x)"}.get(
        bug, f"print({expression})"
    )
    tail = chat.CALL_TAIL_BROKEN if bug == "json" else chat.CALL_TAIL
    return f"<tool_call>{chat.CALL_HEAD}{code}{tail}</tool_call>"


def error_text(rng: random.Random, bug: str, expression: str) -> str:
    """A text like the service's for such a bug, in half of the cases with random words around it."""
    where, mark = '  File "/main.py", line 1', " " * rng.randint(4, 24) + "^" * rng.randint(1, 8)
    trace = f"Traceback (most recent call last):\n{where}, in <module>\n"
    text = {
        "paren": f"{where}\n    print({expression}\n{mark}\nSyntaxError: '(' was never closed",
        "name": f"{trace}    pritn({expression})\n{mark}\nNameError: name 'pritn' is not defined. Did you mean: 'print'?",
        "operand": f"{where}\n    print({expression}x)\n{mark}\nSyntaxError: invalid decimal literal",
        "json": _parse_failure(expression),
        "zero": f"{trace}    print({expression})\n{mark}\nZeroDivisionError: integer modulo by zero",
        "time": "[timed out after 0.5 s]",
    }[bug]
    if rng.random() < 0.5:
        return text
    return filler(rng) + "\n" + (text if rng.random() < 0.7 else "") + "\n" + filler(rng)


def _parse_failure(expression: str) -> str:
    failure = chat.read_turn(call_text(expression, "json")).calls[0]
    assert isinstance(failure, chat.ParseFailure)
    return failure.why


def filler(rng: random.Random) -> str:
    count = rng.randint(10, 60) if rng.random() < 0.35 else int(rng.expovariate(0.15))
    known = rng.random()  # share of words that the tokenizer knows
    return " ".join(rng.choice(_WORDS) if rng.random() < known else _made_up(rng) for _ in range(count))


def _made_up(rng: random.Random) -> str:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_.:;'\"()[]/#-^~=<>,!$&|"
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 6)))


def _draw(rng: random.Random, shares: dict[str, float]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]
