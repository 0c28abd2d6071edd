"""Judge a batch of solutions, and verify a batch of answers. For operators of a judge.

    python examples/judge.py [URL]

`judge` runs one program on many tests, each in a fresh sandbox that never sees the expected output. `verify_many` compares
final answers with the truth. A failure of the machine is never scored: `score` or `equal` is None, and the item is sent again.
"""

import asyncio
import sys

from exec_client import AsyncClient, Judgement, Limits, Tags, Test

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
TESTS = [Test("1 2", "3"), Test("-4 4", "0"), Test("1000000000000 1", "1000000000001", id="large")]
SOLUTIONS = {
    "right": "print(sum(map(int, input().split())))",
    "overflow": "a, b = map(int, input().split())\nprint((a + b) % 2**32)",
    "endless": "while True: pass",
    "crash": "print(sum(input().split()))",
    "cheat": "import os\nprint('AC', flush=True)\nos._exit(0)",  # exit code 0 is no proof: the output is compared outside
    "syntax": "print(",
}
ANSWERS = [
    (r"So the result is \boxed{\frac{1}{2}}.", "0.5"),
    (r"<answer>x^2 - 1</answer>", "(x - 1)(x + 1)"),
    ("I think it is 7.", "8"),
]


async def judge(client: AsyncClient, name: str, code: str) -> tuple[str, Judgement]:
    limits = Limits(wall_s=1, memory_mb=256)
    return name, await client.judge(code, TESTS, limits=limits, tags=Tags(run="judge", rollout=name))


async def main() -> None:
    async with AsyncClient(URL) as client:
        judged = await asyncio.gather(*(judge(client, name, code) for name, code in SOLUTIONS.items()))
        verified = await client.verify_many(ANSWERS, tags=Tags(run="judge"))
    for name, judgement in judged:
        if judgement.score is None:
            print(f"{name}: not judged, send it again: {judgement.verdict}")
            continue
        verdicts = " ".join(test.verdict for test in judgement.tests)
        print(f"{name:10} {judgement.verdict:3} score {judgement.score:.2f}  ({verdicts})")
    for (_, truth), verification in zip(ANSWERS, verified, strict=True):
        print(f"{truth:16} equal: {verification.equal}  (compared: {verification.extracted})")


asyncio.run(main())
