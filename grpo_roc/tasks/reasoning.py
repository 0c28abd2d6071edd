"""Procedural problems of reasoning-gym, with its scorers: `pip install reasoning-gym`.

A problem is a data set's name and an index. Demonstrations show the tool on some of the data sets; RL has to carry its use over
to the others. As in `arith`, some demonstrations begin with a bug and repair it.
"""

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from grpo_roc import chat, config
from grpo_roc.tasks.arith import Split, answer
from grpo_roc.tasks.base import Problem, Segment, Task

INDEXES = 1 << 31
# A program for each problem. These data sets' scorers compare numbers and texts; others parse what the model wrote.
PROGRAMS: dict[str, Callable[[dict[str, Any]], str]] = {
    "products": lambda known: f"print({known['expression']})",
    "chain_sum": lambda known: f"print({known['expression']})",
    "basic_arithmetic": lambda known: f"print({known['expression'].replace('/', '//')})",  # its division rounds down
    "gcd": lambda known: f"import math\nprint(math.gcd({', '.join(map(str, known['numbers']))}))",
    "lcm": lambda known: f"import math\nprint(math.lcm({', '.join(map(str, known['numbers']))}))",
    "count_bits": lambda known: f"print(bin({known['number']}).count('1'))",
    "letter_counting": lambda known: f"print({' '.join(known['span'])!r}.lower().count({known['target_letter']!r}))",
}
RUN = ("I let Python compute it.", "This is a task for the tool.", "Let me run a program.")
FIX = ("The program has a mistake. I correct it.", "That failed. I try again.")
DONE = ("The tool printed the result.", "Now I know the answer.")
TRACE = 'Traceback (most recent call last):\n  File "/main.py", line {line}, in <module>\n    {last}\n    ^^^^^\n'


@cache
def _dataset(name: str, options: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise config.ConfigError("task.kind=reasoning_gym: pip install reasoning-gym") from error
    return reasoning_gym.create_dataset(name, seed=0, size=INDEXES, **json.loads(options))


def dataset(settings: config.Task, name: str) -> Any:
    """Items are made when they are asked for."""
    if name not in PROGRAMS:
        raise config.ConfigError(f"task.datasets: unknown data set {name}; known ones: {', '.join(PROGRAMS)}")
    return _dataset(name, json.dumps(settings.datasets.get(name, {}), sort_keys=True))


def score(settings: config.Task, problem: str, given: str) -> float:
    """1 if the data set's own scorer finds the answer entirely right. `given` may be inside \\boxed{} and tags."""
    name, _, index = problem.rpartition("-")
    found = dataset(settings, name)
    return float(found.score_answer(plain(given), found[int(index)]) >= 1)


def plain(given: str) -> str:
    text = re.sub(r"</?answer>", "", given).strip()
    boxed = re.search(r"\\boxed\{(.*)\}", text, re.S)
    return (boxed[1] if boxed else text).strip()


class Reasoning(Task):
    def _make_pool(self) -> Sequence[Problem]:
        rng = random.Random("pool")
        return [self._draw(rng, list(self._settings.datasets), "train") for _ in range(self._settings.pool)]

    def batch(self, seed: int, step: int, count: int) -> list[Problem]:
        if self.pool:
            return super().batch(seed, step, count)
        rng = random.Random(f"rl:{seed}:{step}")
        return [self._draw(rng, list(self._settings.datasets), "train") for _ in range(count)]

    def benchmarks(self, count: int) -> dict[str, list[Problem]]:
        """One for each data set."""
        return {name: self._several(f"heldout:{name}", [name], "test", count) for name in self._settings.datasets}

    def validation(self) -> list[Problem]:
        return self._several("validation", list(self._settings.datasets), "validation", self._settings.val_problems)

    def demonstrations(self, seed: int, step: int, count: int) -> list[list[Segment]]:
        rng = random.Random(f"sft:{seed}:{step}")
        return [list(self._demonstrate(rng)) for _ in range(count)]

    @property
    def texts(self) -> list[str]:
        shown = [segment.text for dialogue in self.demonstrations(0, 0, 64) for segment in dialogue]
        return [*shown, *(problem.text for problem in self._several("texts", list(self._settings.datasets), "train", 64))]

    def _several(self, seed: str, names: Sequence[str], split: Split, count: int) -> list[Problem]:
        rng = random.Random(seed)
        return [self._draw(rng, names, split) for _ in range(count)]

    def _draw(self, rng: random.Random, names: Sequence[str], split: Split) -> Problem:
        """The splits have no text in common."""
        while True:
            name, index = rng.choice(names), rng.randrange(INDEXES)
            item = dataset(self._settings, name)[index]
            if _split(item["question"]) == split:
                return Problem(f"{name}-{index}", item["question"].strip(), item["answer"])

    def _demonstrate(self, rng: random.Random) -> Iterator[Segment]:
        problem = self._draw(rng, self._settings.demonstrated or list(self._settings.datasets), "train")
        name, _, index = problem.id.rpartition("-")
        code = PROGRAMS[name](dataset(self._settings, name)[int(index)]["metadata"])
        yield Segment(chat.prompt(problem.text, self._chat.system, self._chat.opening), False)
        drawn = rng.random()
        if drawn < self._settings.first_guess:
            yield _learned(rng, DONE, answer(str(rng.randint(0, 999))))
            return
        if drawn < self._settings.first_guess + self._settings.first_bug:
            broken, error = _break(rng, code)
            yield _learned(rng, RUN, call(broken))
            yield Segment(chat.observation([error], self._chat.opening), False)
            yield _learned(rng, FIX, call(code))
        else:
            yield _learned(rng, RUN, call(code))
        yield Segment(chat.observation([problem.answer], self._chat.opening), False)
        yield _learned(rng, DONE, answer(problem.answer))


def _split(text: str) -> Split:
    place = zlib.crc32(text.encode()) % 20
    return "test" if place == 0 else "validation" if place == 1 else "train"


def _learned(rng: random.Random, thoughts: Sequence[str], text: str) -> Segment:
    return Segment(f" {rng.choice(thoughts)}</reason>\n{text}{chat.END}", True)


def call(code: str) -> str:
    return f"<tool_call>\n{chat.call_json(code)}\n</tool_call>"


def _break(rng: random.Random, code: str) -> tuple[str, str]:
    """A program with a bug, and what the service says of it."""
    line, last = code.count("\n") + 1, code.splitlines()[-1]
    if rng.random() < 0.5:
        where = f'  File "/main.py", line {line}\n    {last[:-1]}\n         ^\n'
        return code[:-1], f"{where}SyntaxError: '(' was never closed"
    broken = code.replace("print(", "prnt(")
    trace = TRACE.format(line=line, last=last.replace("print(", "prnt("))
    return broken, f"{trace}NameError: name 'prnt' is not defined. Did you mean: 'print'?"
