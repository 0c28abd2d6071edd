"""A multi-turn tool loop, as a reinforcement-learning rollout runs it. For RL researchers.

    python examples/tool_loop.py [URL]

A scripted model takes the place of yours: replace `scripted_model`. Each rollout has a session, so variables last from one turn
to the next. Three kinds of outcomes are kept apart:
  the program failed     blame `model`: a tool error; the model reads it and goes on
  the machine failed     an exception of the client (`Unavailable`): the rollout has no reward and is left out
  the answer             compared by the service, outside of the sandbox, where the program cannot reach it
"""

import asyncio
import sys
from typing import NamedTuple

from exec_client import AsyncClient, Tags, Unavailable

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
QUESTION, TRUTH = "What is the largest prime factor of 2**32 + 1?", "6700417"
MAX_TURNS, TURN_S, OBSERVATION_CHARS = 6, 1.0, 500

# What a model might write, turn by turn. A turn that begins with "Answer:" ends the rollout.
SCRIPTS = {
    "clean": ["n = 2**32 + 1\n[p for p in range(2, 1000) if n % p == 0]", "n // 641", "Answer: 6700417"],
    "repaired": ["m // 641", "m = 2**32 + 1\nm // 641", "Answer: 6700417"],  # a NameError first
    "too slow": ["n = 2**32 + 1", "while n: pass", "n // 641", "Answer: 6700417"],  # a time-out; n is kept
    "wrong": ["2**32 + 1", "Answer: 4294967297"],
}


class Rollout(NamedTuple):
    name: str
    reward: float | None  # None: nobody knows, leave it out
    tool_calls: int
    tool_errors: int


def scripted_model(name: str, messages: list[dict[str, str]]) -> str:
    """The next turn; a real model would read `messages`."""
    return SCRIPTS[name][sum(message["role"] == "assistant" for message in messages)]


async def roll_out(client: AsyncClient, name: str) -> Rollout:
    messages = [{"role": "user", "content": QUESTION}]
    calls = errors = 0
    tags = Tags(run="tool-loop", step=0, rollout=name)
    try:
        async with client.session(tags=tags) as session:
            for _ in range(MAX_TURNS):
                turn = scripted_model(name, messages)
                messages.append({"role": "assistant", "content": turn})
                if turn.startswith("Answer:"):
                    break
                result = await session.run(turn, wall_s=TURN_S)
                calls, errors = calls + 1, errors + (result.blame == "model")
                messages.append({"role": "tool", "content": result.tool_text(OBSERVATION_CHARS)})
        found = await client.verify(messages[-1]["content"], TRUTH, kind="numeric", tags=tags)
    except Unavailable as error:  # SessionLost and InfraFailure too
        print(f"{name}: the service failed, this rollout is left out: {error}", file=sys.stderr)
        return Rollout(name, None, calls, errors)
    return Rollout(name, None if found.equal is None else float(found.equal), calls, errors)


async def main() -> None:
    async with AsyncClient(URL) as client:
        rollouts = await asyncio.gather(*(roll_out(client, name) for name in SCRIPTS))
    for rollout in rollouts:
        print(f"{rollout.name:10} reward {rollout.reward}  tool calls {rollout.tool_calls}  tool errors {rollout.tool_errors}")
    kept = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    print(f"mean reward {sum(kept) / max(1, len(kept)):.2f} of {len(kept)} rollouts")


asyncio.run(main())
