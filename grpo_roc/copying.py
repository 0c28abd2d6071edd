"""Does a policy still copy the operands of a problem after an observation that it has never seen, of any length?

The first call is forced to fail with a text of our own; then the beginning of the next call is forced, and the model writes the
expression. By position a model would find something else there for every length but those of its training. Texts are cut in the
middle as the environment cuts them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from exec_wire.messages.calls import cut_middle
from grpo_roc import chat
from grpo_roc.engines.base import Sampling
from grpo_roc.engines.local import LocalEngine
from grpo_roc.rollout import Codec
from grpo_roc.tasks.arith import THOUGHTS, call_text
from grpo_roc.tasks.base import Problem

LENGTHS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 1000)  # words
REAL = {
    "NameError": (
        'Traceback (most recent call last):\n  File "/main.py", line 1, in <module>\n    pritn({0})\n    ^^^^^\n'
        "NameError: name 'pritn' is not defined. Did you mean: 'print'?"
    ),
    "SyntaxError": "  File \"/main.py\", line 1\n    print({0}\n         ^\nSyntaxError: '(' was never closed",
    "time-out": "[timed out after 0.5 s]",
    "memory limit": "[stopped: memory limit reached]",
}
_UNSEEN = "Zeppelin quartz vivid jumped oxygen fjord waltz rhythm kayak bishop glyph sphinx xylem ymir cwm".split()


def unseen_text(words: int, rng: random.Random) -> str:
    """Of words that no demonstration has."""
    return " ".join(rng.choice(_UNSEEN) for _ in range(words))


def copied_share(
    engine: LocalEngine, codec: Codec, problems: Sequence[Problem], observations: Sequence[str], *, seed: int = 0
) -> float:
    """Of the second calls, those with the whole expression right, at temperature 1."""
    asked = []
    for number, (problem, text) in enumerate(zip(problems, observations, strict=True)):
        ids = codec.prompt(problem.text) + codec.ids(THOUGHTS["run"] + call_text(problem.id, "name") + chat.END)
        ids += codec.observation([text]) + codec.ids(f"{THOUGHTS['fix']}<tool_call>{chat.CALL_HEAD}print(")
        asked.append((f"copy-{number}", ids, Sampling(24, 1.0, codec.stop, (seed, number))))
    said = engine.generate_all(asked)
    for name, _, _ in asked:
        engine.drop(name)
    right = [codec.text(one.ids).startswith(problem.id) for one, problem in zip(said, problems, strict=True)]
    return sum(right) / len(right)


def by_length(engine: LocalEngine, codec: Codec, problems: Sequence[Problem], max_chars: int) -> dict[str, float]:
    rng = random.Random("copying")
    texts = {f"{words} unseen words": [unseen_text(words, rng) for _ in problems] for words in LENGTHS}
    texts |= {name: [text.format(problem.id) for problem in problems] for name, text in REAL.items()}
    return {
        name: copied_share(engine, codec, problems, [cut_middle(text, max_chars) for text in its])
        for name, its in texts.items()
    }
