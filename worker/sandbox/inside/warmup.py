"""What every program of a zygote would otherwise pay on its own: the first use of the compiler, of a traceback, of streams.

Short and generic: no program of a benchmark is in here.
"""

import io
import sys

COMMON = """
import math, itertools, functools, collections
from fractions import Fraction
def f(n, *rest, **more):
    return [k * k for k in range(n) if k % 2] + sorted({str(k): k for k in range(n)}.values())
class C:
    def __init__(self): self.x = 1
    def __repr__(self): return f"C({self.x!r:>5} {3.14159:.2f})"
try:
    print(f(5), C(), "%d %s" % (1, "x"), Fraction(1, 3) + 1)
    1 / 0
except ZeroDivisionError as error:
    print(error)
print(" ".join(map(str, (1, 2))), end="", flush=True)
"""

FAILING = ["def f(:\n", "undefined_name\n"]

BY_IMPORT: dict[str, str] = {}


def warm_up(imports: list[str]) -> None:
    for name in imports:
        __import__(name)
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = io.StringIO()
    try:
        for source in [COMMON, *(BY_IMPORT[name] for name in imports if name in BY_IMPORT)]:
            exec(compile(source, "/main.py", "exec"), {"__name__": "warmup"})
        for source in FAILING:
            _fail(source)
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def _fail(source: str) -> None:
    try:
        exec(compile(source, "/main.py", "exec"), {"__name__": "warmup"})
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
