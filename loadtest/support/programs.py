"""Program templates of the project's own workload: what a math model writes when it has a Python tool.

A template's `$name` places are filled with numbers drawn from the given ranges. Each program is deterministic, also under
another hash seed: no set of strings is printed in its own order. `expect` is how it ends in a plain interpreter.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field
from typing import Literal

Expect = Literal["ok", "error", "timeout"]


@dataclass(frozen=True)
class Template:
    name: str
    code: str
    numbers: dict[str, range] = field(default_factory=dict)
    stdin: str = ""  # with the same places
    stdin_integers: int = 0  # so many random integers on one line, after `stdin`
    expect: Expect = "ok"

    def fill(self, rng: random.Random) -> tuple[str, str]:
        """Code and standard input for one draw of the numbers."""
        drawn = {name: rng.choice(numbers) for name, numbers in self.numbers.items()}
        integers = " ".join(str(rng.randrange(-500, 2000)) for _ in range(self.stdin_integers))
        stdin = string.Template(self.stdin).substitute(drawn)
        return string.Template(self.code.lstrip("\n")).substitute(drawn), f"{stdin}{integers}\n" if stdin or integers else ""


SMALL, MEDIUM, HUNDREDS = range(2, 12), range(12, 60), range(150, 800)

STD = [
    Template("arithmetic", "print(($a ** 2 + $b) * $c - $a * $b)\n", {"a": MEDIUM, "b": HUNDREDS, "c": SMALL}),
    Template("percent", "price = $p\nprint(f'{price * (1 - $d / 100) * 1.07:.2f}')\n", {"p": HUNDREDS, "d": range(5, 60)}),
    Template(
        "sieve",
        """
limit = $n
sieve = bytearray([1]) * (limit + 1)
sieve[:2] = b"\\0\\0"
for i in range(2, int(limit ** 0.5) + 1):
    if sieve[i]:
        sieve[i * i :: i] = bytes(len(range(i * i, limit + 1, i)))
primes = [i for i, flag in enumerate(sieve) if flag]
print(len(primes), primes[-1], sum(primes) % $m)
""",
        {"n": range(2000, 20000), "m": range(97, 997)},
    ),
    Template(
        "collatz",
        """
def length(n):
    steps = 1
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps

best = max(range(1, $n), key=length)
print(best, length(best))
""",
        {"n": range(100, 700)},
    ),
    Template(
        "digits",
        """
# numbers whose digit sum divides them
hits = [n for n in range(1, $n) if n % sum(int(d) for d in str(n)) == 0]
print(len(hits))
print(hits[-5:])
""",
        {"n": range(300, 3000)},
    ),
    Template(
        "continued_fraction",
        """
from fractions import Fraction

def expand(value, depth):
    terms = []
    for _ in range(depth):
        whole = value.numerator // value.denominator
        terms.append(whole)
        if value == whole:
            break
        value = 1 / (value - whole)
    return terms

print(expand(Fraction($a, $b), 12))
""",
        {"a": HUNDREDS, "b": MEDIUM},
    ),
    Template(
        "egyptian",
        """
from fractions import Fraction
rest, parts = Fraction($a, $b), []
while rest > 0 and len(parts) < 8:
    unit = -(-rest.denominator // rest.numerator)
    parts.append(unit)
    rest -= Fraction(1, unit)
print(parts if max(parts) < 10**30 else len(parts))
""",
        {"a": range(2, 10), "b": range(11, 60)},
    ),
    Template(
        "triples",
        """
import math
count = 0
for a in range(1, $n):
    for b in range(a, $n):
        c = math.isqrt(a * a + b * b)
        if c < $n and c * c == a * a + b * b and math.gcd(a, b) == 1:
            count += 1
print("primitive triples:", count)
""",
        {"n": range(40, 140)},
    ),
    Template(
        "dice",
        """
import itertools
from collections import Counter
ways = Counter(sum(roll) for roll in itertools.product(range(1, 7), repeat=4))
target = $t
print(f"P(sum = {target}) = {ways[target]}/{6 ** 4}")
print(ways[target] / 6 ** 4)
""",
        {"t": range(4, 25)},
    ),
    Template(
        "permutations",
        """
from itertools import permutations
total = 0
for p in permutations(range(1, 7)):
    if all(abs(p[i] - p[i + 1]) <= $d for i in range(5)):
        total += 1
print(total)
""",
        {"d": range(2, 6)},
    ),
    Template(
        "partitions",
        """
from functools import cache

@cache
def p(n, largest):
    if n == 0:
        return 1
    return sum(p(n - k, min(k, n - k)) for k in range(1, min(largest, n) + 1))

print(p($n, $n))
""",
        {"n": range(12, 40)},
    ),
    Template(
        "knapsack",
        """
coins = [1, 5, 10, $c, 50]
ways = [1] + [0] * $n
for coin in coins:
    for amount in range(coin, $n + 1):
        ways[amount] += ways[amount - coin]
print(ways[$n])
""",
        {"c": range(11, 45), "n": HUNDREDS},
    ),
    Template(
        "grid_paths",
        """
rows, cols = $r, $c
blocked = {(i * 7 % rows, i * 5 % cols) for i in range(1, 9)} - {(0, 0), (rows - 1, cols - 1)}
table = [[0] * cols for _ in range(rows)]
table[0][0] = 1
for i in range(rows):
    for j in range(cols):
        if (i, j) in blocked:
            table[i][j] = 0
        elif (i, j) != (0, 0):
            table[i][j] = (table[i - 1][j] if i else 0) + (table[i][j - 1] if j else 0)
print(table[-1][-1])
""",
        {"r": range(6, 30), "c": range(6, 30)},
    ),
    Template(
        "shortest_path",
        """
import heapq

n = $n
edges = {i: [((i * 3 + 1) % n, i % 7 + 1), ((i + 1) % n, 4), ((i * i) % n, 9)] for i in range(n)}
distance = {0: 0}
queue = [(0, 0)]
while queue:
    d, node = heapq.heappop(queue)
    if d > distance[node]:
        continue
    for neighbour, weight in edges[node]:
        if d + weight < distance.get(neighbour, 10**9):
            distance[neighbour] = d + weight
            heapq.heappush(queue, (d + weight, neighbour))
print(distance[n - 1], sum(distance.values()))
""",
        {"n": range(60, 400)},
    ),
    Template(
        "newton_decimal",
        """
from decimal import Decimal, getcontext
getcontext().prec = 50
def cube_root(value):
    x = Decimal(value) ** (Decimal(1) / 3)
    for _ in range(6):
        x -= (x ** 3 - value) / (3 * x * x)
    return x
print(str(cube_root(Decimal($a)))[:40])
""",
        {"a": range(2, 500)},
    ),
    Template(
        "monte_carlo",
        """
import random
random.seed($s)
inside = sum(random.random() ** 2 + random.random() ** 2 < 1 for _ in range($n))
print(round(4 * inside / $n, 4))
""",
        {"s": range(1, 10_000), "n": range(1000, 12_000)},
    ),
    Template(
        "modular",
        """
m = $m * 2 + 1
print(pow($a, 10**6 + 3, m))
print([x for x in range(m) if (x * x - $a) % m == 0][:6])
inverse = pow(2, -1, m)
print(inverse, 2 * inverse % m)
""",
        {"m": range(50, 900), "a": MEDIUM},
    ),
    Template(
        "statistics",
        """
import sys, statistics
data = [int(word) for word in sys.stdin.read().split()]
print(f"n={len(data)} mean={statistics.mean(data):.3f} median={statistics.median(data)} sd={statistics.pstdev(data):.3f}")
print(min(data), max(data))
""",
        stdin_integers=80,
    ),
    Template(
        "parse_input",
        """
n, k = map(int, input().split())
numbers = list(map(int, input().split()))
window = sum(numbers[:k])
best = window
for i in range(k, len(numbers)):
    window += numbers[i] - numbers[i - k]
    best = max(best, window)
print(best, n)
""",
        {"k": range(2, 20)},
        stdin="60 $k\n",
        stdin_integers=60,
    ),
    Template(
        "word_count",
        """
import re
from collections import Counter
text = "the sum of the first $a odd numbers is the square of $a and the sum of cubes is a square too " * 6
words = Counter(re.findall(r"[a-z]+", text))
for word, count in sorted(words.items(), key=lambda pair: (-pair[1], pair[0]))[:4]:
    print(f"{word:<8}{count:>4}")
""",
        {"a": MEDIUM},
    ),
    Template(
        "polynomial",
        """
class Polynomial:
    def __init__(self, *coefficients):
        self.coefficients = list(coefficients)

    def __call__(self, x):
        value = 0
        for c in reversed(self.coefficients):
            value = value * x + c
        return value

    def __mul__(self, other):
        product = [0] * (len(self.coefficients) + len(other.coefficients) - 1)
        for i, a in enumerate(self.coefficients):
            for j, b in enumerate(other.coefficients):
                product[i + j] += a * b
        return Polynomial(*product)

p = Polynomial($a, -$b, 1) * Polynomial(-1, 0, $a)
print(p.coefficients, [p(x) for x in range(-3, 4)])
""",
        {"a": MEDIUM, "b": SMALL},
    ),
    Template(
        "matrix_power",
        """
MOD = 10**9 + 7

def multiply(A, B):
    return [[sum(a * b for a, b in zip(row, col)) % MOD for col in zip(*B)] for row in A]

def power(A, n):
    result = [[int(i == j) for j in range(len(A))] for i in range(len(A))]
    while n:
        if n & 1:
            result = multiply(result, A)
        A, n = multiply(A, A), n >> 1
    return result

print(power([[1, $a, 1], [1, 0, 0], [0, 1, 0]], 10**$e)[0])
""",
        {"a": SMALL, "e": range(6, 18)},
    ),
    Template(
        "calendar",
        """
from datetime import date, timedelta
start = date($y, 1, 1)
days = [start + timedelta(days=i) for i in range(365 * 4)]
print(sum(d.day == 13 and d.weekday() == 4 for d in days), days[-1].isoformat())
""",
        {"y": range(1900, 2090)},
    ),
    Template(
        "bisection",
        """
import math
f = lambda x: math.exp(-x) * x * $a - math.log(x + $b)
low, high = 0.0, 1.0
for step in range(200):
    middle = (low + high) / 2
    if (f(low) < 0) == (f(middle) < 0):
        low = middle
    else:
        high = middle
print(f"{low:.10f}")
""",
        {"a": range(20, 90), "b": SMALL},
    ),
    Template(
        "factor_by_hand",
        """
def factors(n):
    found, d = {}, 2
    while d * d <= n:
        while n % d == 0:
            found[d] = found.get(d, 0) + 1
            n //= d
        d += 1
    if n > 1:
        found[n] = found.get(n, 0) + 1
    return found

for n in range($a * 1000, $a * 1000 + 12):
    print(n, factors(n))
""",
        {"a": range(12, 900)},
    ),
    Template(
        "check_answer",
        """
# Let me verify the answer by brute force over all assignments.
from itertools import product
solutions = []
for x, y, z in product(range(-12, 13), repeat=3):
    if x + y + z == $s and x * y + y * z + z * x == $q:
        solutions.append((x, y, z))
print("solutions:", sorted(solutions)[:5], "count:", len(solutions))
assert all(x + y + z == $s for x, y, z in solutions)
""",
        {"s": range(-6, 12), "q": range(-30, 30)},
    ),
    Template(
        "report",
        """
import json
rows = []
balance = $b * 100.0
for year in range(1, 31):
    interest = round(balance * $r / 1000, 2)
    balance = round(balance + interest - 150, 2)
    rows.append({"year": year, "interest": interest, "balance": balance})
for row in rows:
    print(json.dumps(row))
""",
        {"b": range(40, 400), "r": range(10, 90)},
    ),
]

SYMPY = [
    Template(
        "quadratic",
        "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - $a*x + $b, x))\n",
        {"a": range(2, 30), "b": range(1, 60)},
    ),
    Template(
        "system",
        """
from sympy import *
a, b, c = symbols('a b c')
answer = solve([a + b + c - $s, 2*a - b + 3*c - $t, a - 4*b - c + 2], [a, b, c], dict=True)
print(answer[0][a], answer[0][b], answer[0][c])
""",
        {"s": MEDIUM, "t": MEDIUM},
    ),
    Template(
        "nonlinear_system",
        """
from sympy import symbols, Eq, solve
x, y = symbols('x y', real=True)
print(solve([Eq(x + y, $s), Eq(x * y, $p)], [x, y]))
""",
        {"s": range(3, 25), "p": range(2, 40)},
    ),
    Template(
        "cubic_roots",
        """
import sympy as sp
x = sp.Symbol('x')
p = sp.Poly((x - $a) * (x + $b) * (2*x - $c), x)
print(p.as_expr(), sp.roots(p), p.discriminant())
""",
        {"a": range(1, 12), "b": range(1, 12), "c": range(1, 20, 2)},
    ),
    Template(
        "simplify",
        """
from sympy import *
x = symbols('x', positive=True)
expression = (x**2 - $a**2) / (x**2 + 2*$a*x + $a**2)
print(cancel(expression), simplify(sqrt($b * x**2) / x))
print(expression.subs(x, $b).evalf(12))
""",
        {"a": SMALL, "b": MEDIUM},
    ),
    Template(
        "nested_radicals",
        """
from sympy import sqrt, sqrtdenest, nsimplify
print(sqrtdenest(sqrt($a + $b + 2*sqrt($a * $b))))
print(1 / (sqrt($a) + 1))
""",
        {"a": range(2, 30), "b": range(2, 30)},
    ),
    Template(
        "calculus",
        """
from sympy import symbols, diff, integrate, sin, exp
x = symbols('x')
f = $a * x**3 * exp(-x) + sin($b * x)
print(diff(f, x), diff(f, x, 2).subs(x, 0))
print(integrate($a * x**2 - $b * x + 1, (x, 0, $c)))
""",
        {"a": SMALL, "b": SMALL, "c": SMALL},
    ),
    Template(
        "antiderivative",
        """
import sympy
from sympy.abc import x
F = sympy.integrate($a * x**3 - $b * x + 2, x)
print(F, F.subs(x, 2) - F.subs(x, 0))
""",
        {"a": SMALL, "b": MEDIUM},
    ),
    Template(
        "limits",
        """
from sympy import limit, oo, sin, tan, symbols
x = symbols('x')
print(limit(sin($a * x) / tan($b * x), x, 0))
print(limit((1 + $a / x)**x, x, oo))
""",
        {"a": SMALL, "b": SMALL},
    ),
    Template(
        "series",
        "from sympy import *\nx = symbols('x')\nprint(series(exp($a*x) * cos($b*x), x, 0, 4))\n",
        {"a": SMALL, "b": SMALL},
    ),
    Template(
        "exact_arithmetic",
        """
from sympy import Rational, sqrt, pi, Integer
r = Rational($a, $b) + Rational(3, 7) ** 2
area = pi * Integer($a) ** 2 / 4
print(r, r.limit_denominator(50), area, area.evalf(20), sqrt(r).evalf(15))
""",
        {"a": MEDIUM, "b": MEDIUM},
    ),
    Template(
        "expand_factor",
        """
from sympy import symbols, expand, factor
a, b = symbols('a b')
print(expand((a + $m*b)**4))
print(factor(a**2 - $m**2 * b**2))
""",
        {"m": SMALL},
    ),
    Template(
        "divisors",
        """
from sympy import divisors, gcd, lcm, divisor_count, totient
n = $a * $b * 12
pairs = [(d, n // d) for d in divisors(n) if d * d <= n]
print(len(pairs), pairs[-1], gcd(n, $c), lcm($a, $b), divisor_count(n), totient(n))
""",
        {"a": MEDIUM, "b": MEDIUM, "c": HUNDREDS},
    ),
    Template(
        "counting",
        "from sympy import *\nprint(binomial($n, $k), factorial($k), fibonacci($n), catalan($k))\n",
        {"n": range(20, 90), "k": range(3, 18)},
    ),
    Template(
        "evaluate",
        """
import sympy as sp
x, y = sp.symbols('x y')
f = sp.sympify("x**3*y - $a*x*y**2 + $b")
print([f.subs({x: i, y: i + 1}) for i in range(5)])
print(sp.latex(f), sp.degree(f, x))
""",
        {"a": SMALL, "b": MEDIUM},
    ),
    Template(
        "linear_equation",
        "from sympy import Symbol, Eq, solve\nn = Symbol('n')\nprint(solve(Eq($a * n + $b, $c * n - 7), n))\n",
        {"a": range(2, 9), "b": MEDIUM, "c": range(9, 20)},
    ),
    Template(
        "summation",
        """
from sympy import symbols, summation, binomial
k, n = symbols('k n', integer=True, positive=True)
closed = summation(k * ($a + k), (k, 1, $n))
print(closed)
print(sum(binomial($b, j) * j for j in range($b + 1)))
""",
        {"a": SMALL, "n": HUNDREDS, "b": SMALL},
    ),
    Template(
        "number_theory",
        """
from sympy import factorint, isprime, nextprime, primerange, divisor_sigma
n = $a * $b + 1
print(n, factorint(n), isprime(n), nextprime(n))
print(sum(primerange($a, $b)), divisor_sigma(n))
""",
        {"a": MEDIUM, "b": HUNDREDS},
    ),
    Template(
        "residues",
        """
from sympy.ntheory import n_order, primitive_root, sqrt_mod
from sympy import prime, mod_inverse
p = prime($k)
print(p, primitive_root(p), n_order(2, p) if p != 2 else 1, mod_inverse($a, p), sqrt_mod($a * $a, p))
""",
        {"k": range(30, 200), "a": range(2, 40)},
    ),
    Template(
        "diophantine",
        """
from sympy import symbols, diophantine
x, y = symbols('x y', integer=True)
print(sorted(map(str, diophantine($a*x + $b*y - $c))))
""",
        {"a": range(3, 20, 2), "b": range(4, 20, 2), "c": MEDIUM},
    ),
    Template(
        "matrix",
        """
from sympy import Matrix, Rational, eye
M = Matrix([[$a, 1, 2], [0, $b, 1], [1, 0, $c]])
print(M.det(), M.trace(), M.rank())
print(M.inv() * M == eye(3), (M - eye(3)).charpoly().as_expr())
""",
        {"a": MEDIUM, "b": MEDIUM, "c": MEDIUM},
    ),
    Template(
        "geometry",
        """
from sympy import Point, Triangle, Circle, Line
A, B, C = Point(0, 0), Point($a, 0), Point($b, $c)
t = Triangle(A, B, C)
print(t.area, t.centroid, t.circumradius)
print(Line(A, C).distance(B))
""",
        {"a": range(4, 20), "b": range(1, 12), "c": range(1, 12)},
    ),
    Template(
        "inequality",
        """
from sympy import symbols, solve_univariate_inequality, S
x = symbols('x', real=True)
print(solve_univariate_inequality((x - $a) * (x + $b) < 0, x, relational=False))
""",
        {"a": SMALL, "b": SMALL},
    ),
    Template(
        "trigonometry",
        """
from sympy import *
t = symbols('t')
print([cos(pi * k / $n) for k in range(4)], tan(pi / 12))
print(expand_trig(sin(2*t + pi/$n)), nsolve(cos(t) - t / $a, t, 1))
""",
        {"a": SMALL, "n": range(3, 7)},
    ),
]

NUMPY = [
    Template(
        "linear_solve",
        """
import numpy as np
n = $n
A = np.fromfunction(lambda i, j: 1.0 / (1 + abs(i - j)), (n, n)) + n * np.eye(n)
x = np.linalg.solve(A, np.arange(1.0, n + 1))
print(np.round(x[:4], 6), round(float(np.linalg.det(A / n)), 6))
""",
        {"n": range(4, 40)},
    ),
    Template(
        "markov",
        """
import numpy as np
P = np.array([[0.$a, 1 - 0.$a, 0], [0.2, 0.5, 0.3], [0.1, 0.$b, 0.9 - 0.$b]])
state = np.array([1.0, 0.0, 0.0])
for _ in range(200):
    state = state @ P
print(state.round(8))
""",
        {"a": range(1, 10), "b": range(1, 9)},
    ),
    Template(
        "vector_sieve",
        """
import numpy as np
n = $n
flags = np.ones(n + 1, dtype=bool)
flags[:2] = False
for i in range(2, int(n ** 0.5) + 1):
    if flags[i]:
        flags[i * i :: i] = False
print(np.count_nonzero(flags), np.flatnonzero(flags)[-3:])
""",
        {"n": range(20_000, 200_000)},
    ),
    Template(
        "simulation",
        """
import numpy as np
rng = np.random.default_rng($s)
walks = rng.choice([-1, 1], size=(400, $n)).cumsum(axis=1)
print(round(float((walks.max(axis=1) >= 10).mean()), 4), int(walks[:, -1].min()))
""",
        {"s": range(10_000), "n": range(50, 300)},
    ),
    Template(
        "legacy_random",
        """
import numpy as np
np.random.seed($s)
x = np.random.normal($m, 3, 2000)
print(f'{x.mean():.5f} {x.std(ddof=1):.5f} {np.percentile(x, 90):.5f}')
""",
        {"s": range(10_000), "m": SMALL},
    ),
    Template(
        "counting_grid",
        """
import numpy as np
x, y = np.meshgrid(np.arange(-$r, $r + 1), np.arange(-$r, $r + 1))
inside = x**2 + y**2 <= $r**2
print("lattice points:", inside.sum(), "on the circle:", (x**2 + y**2 == $r**2).sum())
""",
        {"r": range(20, 250)},
    ),
    Template(
        "eigenvalues",
        """
import numpy as np
A = np.array([[$a, 2, 0], [2, $b, 1], [0, 1, $c]], dtype=float)
values = np.linalg.eigvalsh(A)
print(np.round(values, 6), np.linalg.matrix_rank(A))
print(np.allclose(np.prod(values), np.linalg.det(A)))
""",
        {"a": SMALL, "b": SMALL, "c": SMALL},
    ),
    Template(
        "fit",
        """
import numpy as np
x = np.linspace(0, 5, $n)
y = $a * x**2 - 3 * x + np.sin(7 * x)
c = np.polyfit(x, y, 2)
print(np.round(c, 5), round(float(np.abs(np.polyval(c, x) - y).max()), 5))
""",
        {"n": range(20, 400), "a": SMALL},
    ),
    Template(
        "fft",
        """
import numpy as np
n = 256
t = np.arange(n) / n
signal = np.sin(2 * np.pi * $f * t) + 0.5 * np.cos(2 * np.pi * $g * t)
power = np.abs(np.fft.rfft(signal)) ** 2
print(np.argsort(power)[-2:][::-1], np.round(power.max(), 3))
""",
        {"f": range(3, 40), "g": range(41, 100)},
    ),
]

SCIPY = [
    Template(
        "root",
        """
from scipy.optimize import fsolve
import numpy as np
print(np.round(fsolve(lambda x: np.cos(x) - x / $a, 1.0), 6))
""",
        {"a": range(2, 40)},
    ),
    Template(
        "quadrature",
        """
from scipy import integrate
import math
value, error = integrate.quad(lambda x: math.exp(-x * x / $a), 0, $b)
print(f'{value:.8f}')
""",
        {"a": SMALL, "b": SMALL},
    ),
    Template(
        "minimise",
        """
from scipy.optimize import minimize_scalar
best = minimize_scalar(lambda x: (x - $a) ** 2 + 1 / (x + 0.5), bounds=(0, 100), method="bounded")
print(round(best.x, 3), round(best.fun, 5))
""",
        {"a": range(1, 60)},
    ),
    Template(
        "linear_program",
        """
from scipy.optimize import linprog
result = linprog(c=[-$a, -$b], A_ub=[[1, 2], [3, 1]], b_ub=[40, 60])
print(result.status, round(-result.fun, 4))
""",
        {"a": SMALL, "b": SMALL},
    ),
    Template(
        "special",
        "from scipy.special import comb, gamma\nprint(comb($n, $k, exact=True), round(gamma($k + 0.5), 6))\n",
        {"n": range(20, 80), "k": range(2, 18)},
    ),
    Template(
        "distribution",
        "from scipy import stats\nprint(round(stats.norm.cdf($a / 10), 6), round(stats.binom.pmf($k, 30, 0.3), 8))\n",
        {"a": range(-30, 30), "k": range(0, 25)},
    ),
]

_ERRORS = {
    "name": "total = 0\nfor k in range($a):\n    total += k\nprint(totl)\n",
    "zero": "values = [$a, 3, 0]\nprint(values[0] // values[1])\nprint(values[1] / values[2])\n",
    "syntax": "def area(r)\n    return 3.14159 * r ** 2\nprint(area($a))\n",
    "indentation": "n = $a\nif n > 3:\nprint(n)\n",
    "bracket": "print((($a + 2) * 3)\n",
    "type": "answer = $a\nprint('the answer is ' + answer)\n",
    "index": "xs = list(range($a))\nprint(xs[0])\nprint(xs[$a])\n",
    "key": "table = {'x': $a}\nprint(table['y'])\n",
    "attribute": "import math\nprint(math.cube($a))\n",
    "value": "print(int('$a.5'))\n",
    "recursion": "def f(n):\n    return n * f(n - 1)\nprint(f($a))\n",
    "assertion": "x = $a\nassert x * x == x, f'wrong: {x * x}'\n",
    "no_input": "a = int(input())\nb = int(input())\nprint(a + b + $a)\n",
    "no_module": "import sage.all as sage\nprint(sage.factor($a))\n",
    "numpy_shape": "import numpy as np\nprint(np.ones((2, $a)) @ np.ones((2, $a + 1)))\n",
    "sympy_call": "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - $a, y))\n",
    "exit": "import sys\nprint('no solution for', $a)\nsys.exit(1)\n",
}
ERROR = [Template(name, code, {"a": MEDIUM}, expect="error") for name, code in _ERRORS.items()]

_ENDLESS = {
    "search": "n = $a\nwhile True:\n    n += 2\n    if n * n < 0:\n        break\nprint(n)\n",
    "no_progress": "low, high = 0.0, $a.0\nwhile high - low > 1e-20:\n    low = min(low, (low + high) / 2)\n",
    "after_output": "print('from', $a, flush=True)\nimport itertools\nfor n in itertools.count($a):\n    n ** 3 % 7\n",
    "waits": "import threading\nthreading.Event().wait()\nprint($a)\n",
}
ENDLESS = [Template(name, code, {"a": MEDIUM}, expect="timeout") for name, code in _ENDLESS.items()]

TEMPLATES: dict[str, list[Template]] = {
    "std": STD,
    "sympy": SYMPY,
    "numpy": NUMPY,
    "scipy": SCIPY,
    "error": ERROR,
    "endless": ENDLESS,
}
