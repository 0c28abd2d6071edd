"""Warm-up of a zygote: common imports, and the first use of each library, so that no program pays for them.

Short and generic. The first run of each line takes milliseconds (caches, lazy imports, dispatch tables).
"""

import importlib
import io
import linecache
import os
import sys
import types

STANDARD = """
    bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math numbers operator
    random re statistics string time traceback typing
""".split()
"""Imported in every zygote, so that a program's own import is a look-up. Each module makes every fork slower: modules with C
libraries (hashlib, lzma, ssl) and rare ones are left out (a list twice as long: +8 % CPU per call)."""

COMMON = """
import math, itertools, functools, collections, re, json, datetime, statistics, heapq
from decimal import Decimal, getcontext
from fractions import Fraction
from functools import lru_cache
@lru_cache(None)
def f(n, *rest, **more):
    return [k * k for k in range(n) if k % 2] + sorted({str(k): k for k in range(n)}.values(), key=lambda v: -v)
class C:
    def __init__(self): self.x = 1
    def __repr__(self): return f"C({self.x!r:>5} {3.14159:.2f})"
try:
    print(f(5), C(), "%d %s" % (1, "x"), Fraction(1, 3) + 1, Decimal(2).sqrt(), math.gcd(4, 6), set("ab"), 10**30 % 7)
    1 / 0
except ZeroDivisionError as error:
    print(error)
print(list(itertools.permutations(range(3)))[:2], collections.Counter("abca").most_common(1), collections.deque([1]))
print(re.findall(r"(\\d+)-(\\w+)", "12-ab"), json.dumps({"a": [1, None]}), json.loads("[1]"), datetime.date(2000, 1, 1))
print(statistics.mean([1, 2]), heapq.nsmallest(1, [2, 1]), int("12"), float("1.5"), round(2.5, 1), sum(map(int, "1 2".split())))
"""

BY_IMPORT = {
    "numpy": """
import numpy as np
a = np.arange(12.0).reshape(3, 4)
print(a, a.T @ a, a.mean(axis=0), np.round(a / 3, 3), a[a > 3], np.array([1, 2]) * 2, np.float64(1.5), a.astype(int))
b = np.array([[2.0, 1.0], [1.0, 3.0]])
print(np.linalg.solve(b, [1.0, 2.0]), np.linalg.inv(b), np.linalg.eigvals(b), np.linalg.det(b), np.roots([1, -3, 2]))
print(np.random.default_rng(1).random(2), np.random.rand(2), np.sort(a.ravel()), np.unique([1, 1]), np.linspace(0, 1, 3), np.pi)
print(np.polynomial.Polynomial([1, 2]), np.polyfit([1, 2, 3], [1, 4, 9], 1), np.concatenate([a, a]), np.cumsum(a), np.where(a > 1))
""",
    "scipy": """
from scipy import integrate, optimize, special, stats, linalg
print(optimize.fsolve(lambda x: x * x - 2, 1.0), optimize.brentq(lambda x: x - 1, 0, 3), integrate.quad(lambda x: x, 0, 1))
print(optimize.minimize(lambda x: (x[0] - 1) ** 2, [0.0]).x, special.comb(5, 2), stats.norm.cdf(0.5), linalg.expm([[0.0]]))
""",
    "sympy": """
from sympy import *
x, y, z, n, k = symbols("x y z n k")
for a, b in (2, 3), (12, 35):
    print(solve(x**2 - (a + b) * x + a * b, x), solve([a * x + b * y - 1, x - y - b], [x, y]), solve(Eq(a * x, b), x), Eq(x, a))
    print(factor(x**3 - a**3), expand((x + a) ** 4 * (y - b)), simplify((x**2 - a * a) / (x - a)), collect(a * x + b * x, x))
    print(sqrt(a * b * b), sqrt(Rational(a, b)), simplify(sqrt(a) / sqrt(b) + root(a, 3)), Rational(a, b) + Integer(b), Pow(a, b))
    print(diff(x**a * sin(b * x), x), integrate(a * x**2 + b, (x, 0, 1)), integrate(x * exp(a * x), x), latex(Rational(a, b) * x))
    print(factorint(a * b * 1009), isprime(a * 97), divisors(a), totient(b), gcd(a, b), lcm(a, b), mod_inverse(a, 97), nextprime(b))
    print(Matrix([[a, b], [1, 2]]).det(), Matrix([[a, 1], [0, b]]).inv(), Matrix([[2, 1], [1, a]]).eigenvals(), binomial(b, 2))
    print(summation(a * n, (n, 1, k)), limit(sin(a * x) / x, x, 0), series(exp(a * x), x, 0, 3), N(sqrt(a) + pi, 15), floor(sqrt(b)))
    print(Poly(a * x**2 + b, x), apart(1 / ((x + a) * (x + b))), together(1 / x + a / y), nsolve(x**3 - a, x, 1), solveset(x - a, x))
print(reduce_inequalities([x - 3 < 0]), trigsimp(cos(x) ** 2 + sin(x) ** 2), nsimplify(0.25), symbols("u:3"), Abs(-3), S(1) / 3)
""",
    "pandas": """
import pandas as pd
d = pd.DataFrame({"k": ["a", "b", "a"], "v": [1, 2, 3]})
print(d, d.describe(), d.groupby("k").v.sum(), d.merge(d, on="k").sort_values("v_x"), pd.to_datetime(["2020-01-01"]), d.v.mean())
""",
    "matplotlib.pyplot": """
import io
import matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.plot([1, 2], label="a"); axes.legend(); axes.set_title("t")
figure.savefig(io.BytesIO(), format="png")
plt.close("all")
from matplotlib import font_manager
for cached in vars(font_manager).values():  # a font keeps its file open, and programs inherit no descriptor
    getattr(cached, "cache_clear", int)()
""",
    # The LaTeX parser builds its tables by use: the first use of each construct takes 10 to 200 ms.
    "math_verify": r"""
import logging
from math_verify import parse, verify
pairs = r'''
1/2 ~ The answer is 0.5
1,000 ~ \boxed{10^3}
$-3$ ~ $x=-3$
$2x+y$ ~ $y+2x$
$50\%$ ~ $0.5$
$\frac{\sqrt{3}}{2}$ ~ \boxed{\frac{\sqrt3}{2}}
$(1,2]$ ~ $x \in (1, 2]$
$\{1,2\}$ ~ $\{2,1\}$
$x^2-1$ ~ $(x-1)(x+1)$
$\pi r^2$ ~ $\pi \cdot r^2$
$1 < x \le 2$ ~ $(1,2]$
$(1, -2)$ ~ $(1,-2)$
$\sin^2 x + \log_2 8$ ~ $3 + \sin(x)^2$
$x=1 \text{ or } x=2$ ~ $1, 2$
$\binom{5}{2} + 3!$ ~ $16$
$\begin{pmatrix}1&2\\3&4\end{pmatrix}$ ~ $\begin{pmatrix}1&2\\3&4\end{pmatrix}$
$2+3i$ ~ $3i+2$
$(-\infty,0)\cup[1,\infty)$ ~ $(-\infty, 0) \cup [1, \infty)$
$5\text{ cm}$ ~ $5$
$x$ ~ $y+1$
$e^{-x}$ ~ $\frac{1}{e^x}$
$\sqrt[3]{2}$ ~ $2^{1/3}$
$|x-1|$ ~ $\left|x - 1\right|$
$90^\circ$ ~ $90$
'''
logging.disable()
for pair in pairs.strip().splitlines():
    truth, answer = (parse(text, parsing_timeout=None) for text in pair.split(" ~ "))
    verify(truth, answer, timeout_seconds=None)
logging.disable(logging.NOTSET)
""",
}
FAILING = ["def f(:\n", "undefined_name\n", "import math\nmath.squareroot(2)\n", "int('x')\n"]


def warm_up(imports: list[str], packages: str) -> None:
    # Without a cache matplotlib reads every font of the system, which takes seconds. The installation makes one.
    if "matplotlib.pyplot" in imports and os.path.isdir(f"{packages}/.matplotlib"):  # noqa: PTH112
        import shutil

        shutil.copytree(f"{packages}/.matplotlib", os.environ["MPLCONFIGDIR"], dirs_exist_ok=True)
    # Stops libraries from starting programs, as matplotlib does (fc-list).
    path, os.environ["PATH"] = os.environ["PATH"], "/none"
    for name in [*STANDARD, *imports]:
        importlib.import_module(name)
    os.environ["PATH"] = path
    stdin, stdout, stderr = sys.stdin, sys.stdout, sys.stderr
    sys.stdout = sys.stderr = io.StringIO()
    try:
        for source in [COMMON, *(BY_IMPORT[name] for name in imports if name in BY_IMPORT)]:
            _run(source)
        for source in FAILING:
            _fail(source)
    finally:
        sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    # Remove what a program could notice of the warm-up.
    linecache.clearcache()
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            vars(module).pop("__warningregistry__", None)  # a warning is shown once per location


def _run(source: str) -> None:
    exec(compile(source, "/main.py", "exec"), {"__name__": "__main__"})


def _fail(source: str) -> None:
    try:
        _run(source)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
