"""A thousand answers and truths of many kinds, right and wrong ones, the same each time.

A kind makes two expressions; `_wrapped` puts the answer into words as a model would. Whether they are equal is not said here.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

Kind = Callable[[random.Random], tuple[str, str]]

NAMES = ["Evelyn", "Carla", "Briana", "Monday", "odd", "even", "ellipse", "east", "no solution", "yes"]
UNITS = [r"\text{ cm}", r"\text{ km/h}", r"\ \mathrm{m}^2", r"^\circ", r"\text{ dollars}", r"\,\text{kg}", r" \text{ hours}"]


class Pair(NamedTuple):
    kind: str
    answer: str
    truth: str
    same_text: bool  # Math-Verify gets the very same texts whichever way the service extracts the answer


def mixed(count: int, seed: int = 20_000) -> list[Pair]:
    """`count` different pairs; each kind as often as every other."""
    rng = random.Random(seed)
    names = list(KINDS)
    pairs: dict[tuple[str, str], Pair] = {}
    for turn in range(50 * count):
        if len(pairs) == count:
            return list(pairs.values())
        pair = _made(names[turn % len(names)], rng)
        pairs.setdefault((pair.answer, pair.truth), pair)
    raise ValueError(f"there are no {count} different pairs")


def _made(kind: str, rng: random.Random) -> Pair:
    answer, truth = KINDS[kind](rng)
    if kind in AS_THEY_ARE:
        return Pair(kind, answer, truth, False)
    return Pair(
        kind, _wrapped(answer, rng), rng.choice([f"${truth}$", f"${truth}$", rf"\boxed{{{truth}}}", rf"\[{truth}\]"]), True
    )


def _wrapped(answer: str, rng: random.Random) -> str:
    return rng.choice(
        [
            rf"\boxed{{{answer}}}",
            rf"Therefore the final answer is $\boxed{{{answer}}}$.",
            f"We add the {rng.randint(2, 9)} terms and simplify.\n\n**Final answer**: \\boxed{{{answer}}}",
            rf"\[ \boxed{{ {answer} }} \]",
            f"${answer}$",
            f"So the answer is ${answer}$.",
            rf"Hence \({answer}\)",
            f"$${answer}$$",
        ]
    )


def _n(rng: random.Random, most: int = 20) -> int:
    return rng.randint(1, most)


def _near(rng: random.Random, number: int) -> int:
    return number if rng.random() < 0.6 else number + rng.choice([-2, -1, 1, 2, 10])


# -- kinds ----------------------------------------------------------------------------------------------------------------


def integers(rng: random.Random) -> tuple[str, str]:
    number = rng.choice([-1, 1]) * rng.randint(0, 10 ** rng.randint(1, 9))
    other = _near(rng, number)
    grouped = rng.choice(
        [f"{other:,}", f"{other:,}".replace(",", "{,}"), f"{other:,}".replace(",", r"\,"), str(other), f"+{other}"]
    )
    return grouped.replace("+-", "-"), str(number)


def decimals(rng: random.Random) -> tuple[str, str]:
    number = round(rng.uniform(-100, 100), rng.randint(1, 5))
    other = rng.choice([number, number, round(number, 2), round(number + 0.1, 4), -number])
    return rng.choice([f"{other}", f"{other:.6f}", f"{other}0"]), f"{number}"


def fractions(rng: random.Random) -> tuple[str, str]:
    over, under, factor = _n(rng), _n(rng, 12), _n(rng, 4)
    sign = rng.choice(["", "-"])
    wrong = _near(rng, over)
    left, between, right = rng.choice(
        [
            (r"\frac{", "}{", "}"),
            (r"\dfrac{", "}{", "}"),
            (r"\tfrac{", "}{", "}"),
            ("", "/", ""),
            ("{", r" \over ", "}"),
            (r"\frac ", " ", ""),
        ]
    )
    return f"{sign}{left}{wrong * factor}{between}{under * factor}{right}", rf"{sign}\frac{{{over}}}{{{under}}}"


def fractions_and_decimals(rng: random.Random) -> tuple[str, str]:
    over, under = _n(rng), rng.choice([2, 3, 4, 5, 7, 8, 16, 25])
    return f"{_near(rng, over) / under:.{rng.randint(1, 8)}f}", rf"\frac{{{over}}}{{{under}}}"


def mixed_numbers(rng: random.Random) -> tuple[str, str]:
    whole, over, under = _n(rng, 9), _n(rng, 6), rng.choice([7, 8, 9])
    return rf"{_near(rng, whole)}\frac{{{over}}}{{{under}}}", rf"\frac{{{whole * under + over}}}{{{under}}}"


def radicals(rng: random.Random) -> tuple[str, str]:
    root, factor = rng.choice([2, 3, 5, 6, 7]), _n(rng, 9)
    wrong = _near(rng, factor)
    written = rng.choice(
        [rf"\sqrt{{{root * wrong**2}}}", rf"{wrong}\sqrt{root}", rf"\sqrt {{{root}}}\cdot {wrong}", rf"{wrong}\sqrt{{{root}}}"]
    )
    return written, rf"{factor}\sqrt{{{root}}}"


def rationalised(rng: random.Random) -> tuple[str, str]:
    root, over = rng.choice([2, 3, 5, 7]), _n(rng, 9)
    return rf"\frac{{{_near(rng, over)}}}{{\sqrt{{{root}}}}}", rf"\frac{{{over}\sqrt{{{root}}}}}{{{root}}}"


def powers(rng: random.Random) -> tuple[str, str]:
    base, exponent = rng.randint(2, 9), rng.randint(2, 6)
    return rf"{base}^{{{exponent}}}", str(_near(rng, base**exponent))


def roots_of_higher_order(rng: random.Random) -> tuple[str, str]:
    base, order = rng.randint(2, 6), rng.randint(3, 5)
    return rf"\sqrt[{order}]{{{base**order}}}", str(_near(rng, base))


def percents(rng: random.Random) -> tuple[str, str]:
    number = _n(rng, 99)
    sign = rng.choice([r"\%", "%", r" \%", r"\text{ percent}"])
    return f"{_near(rng, number)}{sign}", rng.choice(
        [f"{number}", f"{number / 100}", rf"{number}\%", rf"\frac{{{number}}}{{100}}"]
    )


def units(rng: random.Random) -> tuple[str, str]:
    number, unit = _n(rng, 500), rng.choice(UNITS)
    return f"{_near(rng, number)}{unit}", rng.choice([f"{number}", f"{number}{unit}", f"{number}{rng.choice(UNITS)}"])


def money(rng: random.Random) -> tuple[str, str]:
    number = round(rng.uniform(1, 5000), 2)
    return rng.choice([rf"\${number}", rf"\${number:,.2f}", f"{number:.2f}", rf"\text{{USD }}{number}"]), rng.choice(
        [f"{number}", rf"\${number}"]
    )


def scientific(rng: random.Random) -> tuple[str, str]:
    digits, exponent = rng.randint(11, 99) / 10, rng.randint(-5, 9)
    other = _near(rng, exponent)
    written = rng.choice([rf"{digits} \times 10^{{{other}}}", rf"{digits}\cdot 10^{{{other}}}", f"{digits}e{other}"])
    return written, rng.choice([rf"{digits} \times 10^{{{exponent}}}", f"{digits * 10.0**exponent:.10f}".rstrip("0")])


def polynomials(rng: random.Random) -> tuple[str, str]:
    one, two = rng.randint(-6, 6), rng.randint(-6, 6)
    wrong = _near(rng, two)
    return rng.choice(
        [f"(x{one:+d})(x{wrong:+d})", f"(x{wrong:+d})(x{one:+d})", rf"\left(x{one:+d}\right)\left(x{wrong:+d}\right)"]
    ), (f"x^2{one + two:+d}x{one * two:+d}")


def rearranged(rng: random.Random) -> tuple[str, str]:
    a, b, c = _n(rng), _n(rng), _n(rng)
    return rng.choice([f"{c}+{b}x+{a}x^2", f"{a}x^{{2}} + {b}x + {_near(rng, c)}", f"x({a}x+{b})+{c}"]), f"{a}x^2+{b}x+{c}"


def rational_functions(rng: random.Random) -> tuple[str, str]:
    a = _n(rng, 9)
    return rf"\frac{{x^2-{a * a}}}{{x-{_near(rng, a)}}}", rng.choice([f"x+{a}", rf"\frac{{(x+{a})(x-{a})}}{{x-{a}}}"])


def equations(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(-30, 30)
    other, name = _near(rng, number), rng.choice(["x", "y", "n", "k"])
    return rng.choice(
        [f"{name}={other}", f"{name} = {other}", f"{other}={name}", f"{other}", rf"{name}\approx {other}"]
    ), rng.choice([f"{name}={number}", f"{number}"])


def lines(rng: random.Random) -> tuple[str, str]:
    slope, at = _n(rng, 9), rng.randint(-9, 9)
    wrong = _near(rng, at)
    return rng.choice(
        [f"y={slope}x{wrong:+d}", f"y{-wrong:+d}={slope}x", f"{slope}x-y{wrong:+d}=0", f"f(x)={slope}x{wrong:+d}"]
    ), (f"y={slope}x{at:+d}")


def inequalities(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(-9, 9)
    sign, wrong = rng.choice(["<", ">", r"\le", r"\geq"]), _near(rng, number)
    return rng.choice(
        [f"x {sign} {wrong}", f"x {rng.choice(['<', '>'])} {number}", rf"(-\infty, {wrong})", rf"[{wrong}, \infty)"]
    ), (f"x {sign} {number}")


def chained_inequalities(rng: random.Random) -> tuple[str, str]:
    low, high = rng.randint(-9, 0), rng.randint(1, 9)
    return rng.choice([rf"{low} \le x \le {_near(rng, high)}", f"{low} < x < {high}", rf"{low} < x \leq {high}"]), rng.choice(
        [f"[{low},{high}]", f"({low},{high})", rf"{low} \le x \le {high}"]
    )


def intervals(rng: random.Random) -> tuple[str, str]:
    low, high = rng.randint(-9, 0), rng.randint(1, 9)
    left, right = rng.choice("(["), rng.choice(")]")
    other = _near(rng, high)
    return rng.choice(
        [
            f"{left}{low},{other}{right}",
            rf"\left{left}{low}, {other}\right{right}",
            f"({low},{other})",
            rf"{left}{low};{other}{right}",
        ]
    ), f"{left}{low},{high}{right}"


def unions(rng: random.Random) -> tuple[str, str]:
    low, high = rng.randint(-9, 0), rng.randint(1, 9)
    parts = [rf"(-\infty,{low})", rf"({_near(rng, high)},\infty)"]
    rng.shuffle(parts)
    return r"\cup".join(parts), rf"(-\infty,{low})\cup({high},\infty)"


def sets(rng: random.Random) -> tuple[str, str]:
    elements = rng.sample(range(-9, 20), rng.randint(2, 5))
    others = elements[:] if rng.random() < 0.6 else [*elements[:-1], elements[-1] + 1]
    rng.shuffle(others)
    words = ", ".join(map(str, others))
    truth = ",".join(map(str, elements))
    return rng.choice([rf"\{{{words}\}}", words, rf"\left\{{ {words} \right\}}", f"({words})"]), rng.choice(
        [rf"\{{{truth}\}}", truth]
    )


def tuples(rng: random.Random) -> tuple[str, str]:
    point = [rng.randint(-9, 9) for _ in range(rng.randint(2, 3))]
    other = rng.choice([point, point, point[::-1], [*point[:-1], point[-1] + 1]])
    words = ", ".join(map(str, other))
    return rng.choice(
        [f"({words})", rf"\left({words}\right)", rf"\langle {words} \rangle", f"[{words}]"]
    ), f"({','.join(map(str, point))})"


def fractions_in_tuples(rng: random.Random) -> tuple[str, str]:
    a, b = _n(rng, 9), rng.choice([2, 4, 5, 8])
    return rf"\left(\frac{{{a}}}{{{b}}}, {_near(rng, a)}\right)", f"({a / b}, {a})"


def several_solutions(rng: random.Random) -> tuple[str, str]:
    number = _n(rng, 12)
    other = _near(rng, number)
    return rng.choice(
        [
            rf"\pm {other}",
            f"{other}, -{other}",
            rf"x={other} \text{{ or }} x=-{other}",
            rf"x = \pm {other}",
            f"x=-{other}, x={other}",
        ]
    ), rng.choice([rf"\pm {number}", f"-{number}, {number}", rf"\{{-{number}, {number}\}}"])


def matrices(rng: random.Random) -> tuple[str, str]:
    rows = [[rng.randint(-9, 9) for _ in range(2)] for _ in range(rng.randint(1, 3))]
    others = [row[:] for row in rows]
    others[0][0] = _near(rng, others[0][0])
    kinds = rng.choice(["pmatrix", "bmatrix", "vmatrix", "matrix"]), rng.choice(["pmatrix", "bmatrix"])

    def written(kind: str, numbers: list[list[int]]) -> str:
        return rf"\begin{{{kind}}}" + r" \\ ".join(" & ".join(map(str, row)) for row in numbers) + rf"\end{{{kind}}}"

    return written(kinds[0], others), written(kinds[1], rows)


def vectors(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randint(-9, 9) for _ in range(3)]
    others = [*numbers[:-1], _near(rng, numbers[-1])]
    return r"\begin{pmatrix}" + r"\\".join(map(str, others)) + r"\end{pmatrix}", rng.choice(
        [r"\begin{bmatrix}" + r"\\".join(map(str, numbers)) + r"\end{bmatrix}", f"({','.join(map(str, numbers))})"]
    )


def complex_numbers(rng: random.Random) -> tuple[str, str]:
    real, imaginary = rng.randint(-9, 9), _n(rng, 9)
    return rng.choice(
        [f"{real}+{_near(rng, imaginary)}i", f"{imaginary}i{real:+d}", f"{real}-{imaginary}i"]
    ), f"{real}+{imaginary}i"


def constants(rng: random.Random) -> tuple[str, str]:
    factor = _n(rng, 12)
    wrong = _near(rng, factor)
    return rng.choice(
        [
            rf"{wrong}\pi",
            rf"\pi\cdot {wrong}",
            f"{wrong * 3.14159265:.5f}",
            rf"\frac{{{2 * wrong}\pi}}{{2}}",
            rf"{wrong} \pi \text{{ cm}}^2",
        ]
    ), rf"{factor}\pi"


def exponentials(rng: random.Random) -> tuple[str, str]:
    number = _n(rng, 6)
    return rng.choice(
        [rf"e^{{{_near(rng, number)}}}", rf"\exp({number})", rf"e^{{\ln {number}}}", f"{2.718281828**number:.6f}"]
    ), rng.choice([f"e^{number}", f"{number}"])


def logarithms(rng: random.Random) -> tuple[str, str]:
    base, exponent = rng.choice([2, 3, 5, 10]), rng.randint(1, 5)
    return rng.choice(
        [
            rf"\log_{{{base}}} {base**exponent}",
            rf"\log_{base}({base**exponent})",
            rf"\frac{{\ln {base**exponent}}}{{\ln {base}}}",
        ]
    ), (str(_near(rng, exponent)))


def trigonometry(rng: random.Random) -> tuple[str, str]:
    left, right = rng.choice(
        [
            (r"\sin^2 x + \cos^2 x", "1"),
            (r"\sin(2x)", r"2\sin x\cos x"),
            (r"\tan x", r"\frac{\sin x}{\cos x}"),
            (r"\cos\frac{\pi}{3}", r"\frac{1}{2}"),
            (r"\sin 30^\circ", "0.5"),
            (r"\arctan(1)", r"\frac{\pi}{4}"),
            (r"\cos 2x", r"1-2\sin^2 x"),
            (r"\sec x", r"\frac{1}{\cos x}"),
        ]
    )
    factor = _n(rng, 9)
    return rf"{_near(rng, factor)}\left({left}\right)", rf"{factor}\cdot\left({right}\right)"


def counting(rng: random.Random) -> tuple[str, str]:
    n, k = rng.randint(3, 9), rng.randint(1, 3)
    size = 1
    for step in range(k):
        size = size * (n - step) // (step + 1)
    return rng.choice([rf"\binom{{{n}}}{{{k}}}", rf"\frac{{{n}!}}{{{k}!({n}-{k})!}}", rf"{{{n} \choose {k}}}"]), str(
        _near(rng, size)
    )


def factorials(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(2, 7)
    size = 1
    for step in range(2, n + 1):
        size *= step
    return f"{n}!", rng.choice([str(_near(rng, size)), f"{n}!", rf"{n} \cdot {n - 1}!"])


def parts_of_numbers(rng: random.Random) -> tuple[str, str]:
    number = rng.uniform(-20, 20)
    return rng.choice(
        [rf"\lfloor {number:.2f} \rfloor", rf"\lceil {number:.2f} \rceil", rf"|{number:.2f}|", rf"\left|{int(number)}\right|"]
    ), (rng.choice([str(int(number)), str(abs(int(number))), f"{abs(number):.2f}"]))


def sums(rng: random.Random) -> tuple[str, str]:
    most = rng.randint(3, 12)
    return rf"\sum_{{k=1}}^{{{most}}} k", str(_near(rng, most * (most + 1) // 2))


def limits_and_infinity(rng: random.Random) -> tuple[str, str]:
    return rng.choice([r"\infty", r"-\infty", r"+\infty", rf"\frac{{1}}{{{_n(rng)}}}", "0"]), rng.choice(
        [r"\infty", r"-\infty", "0"]
    )


def letters_of_algebra(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(["a", "b", "c", "m", "n", "p", "q"], 2)
    number = _n(rng, 9)
    return rng.choice(
        [
            f"{number}{a}{b}",
            f"{b}{number}{a}".replace(f"{b}{number}", f"{number}{b}"),
            f"{a}^{number}{b}",
            rf"\frac{{{a}}}{{{b}}}",
        ]
    ), (rng.choice([f"{number}{b}{a}", rf"\frac{{{a}}}{{{b}}}", f"{b}{a}^{{{number}}}"]))


def greek(rng: random.Random) -> tuple[str, str]:
    letter, number = rng.choice([r"\alpha", r"\theta", r"\lambda", r"\omega"]), _n(rng, 9)
    return rf"{number}{letter} + {_near(rng, number)}", rf"{number}+{number}{letter}"


def texts(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    other = rng.choice([name, name, rng.choice(NAMES), name.upper(), f" {name} "])
    return rng.choice([rf"\text{{{other}}}", rf"\mathrm{{{other}}}", rf"\textbf{{{other}}}", other]), rf"\text{{{name}}}"


def choices(rng: random.Random) -> tuple[str, str]:
    letter = rng.choice("ABCDE")
    other = rng.choice([letter, letter, rng.choice("ABCDE")])
    return rng.choice(
        [rf"\text{{({other})}}", other, rf"\textbf{{({other})}}", rf"\text{{{other}}}", f"({other})"]
    ), rng.choice([rf"\text{{{letter}}}", letter, rf"\text{{({letter})}}"])


def remainders(rng: random.Random) -> tuple[str, str]:
    number, modulus = _n(rng, 9), rng.randint(10, 20)
    return rf"{_near(rng, number)} \pmod{{{modulus}}}", rng.choice([f"{number}", rf"{number} \pmod{{{modulus}}}"])


def bases(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(5, 200)
    return rng.choice([f"{number:b}_2", rf"{number:o}_8", f"{_near(rng, number)}_{{10}}"]), rng.choice(
        [f"{number:b}_2", f"{number:o}_8"]
    )


def ratios(rng: random.Random) -> tuple[str, str]:
    a, b, factor = _n(rng, 9), _n(rng, 9), _n(rng, 3)
    return rng.choice([f"{a}:{_near(rng, b)}", f"{a * factor}:{b * factor}", rf"\frac{{{a}}}{{{b}}}"]), f"{a}:{b}"


def times_and_dates(rng: random.Random) -> tuple[str, str]:
    hour, minute = _n(rng, 12), rng.randint(0, 59)
    return f"{_near(rng, hour)}:{minute:02d}", rng.choice([f"{hour}:{minute:02d}", rf"{hour}:{minute:02d}\text{{ p.m.}}"])


def cases(rng: random.Random) -> tuple[str, str]:
    number = _n(rng, 9)
    return rf"\begin{{cases}} x={number} \\ y={_near(rng, number)} \end{{cases}}", rng.choice(
        [rf"x={number}, y={number}", f"({number},{number})", rf"\begin{{cases}} x={number} \\ y={number} \end{{cases}}"]
    )


def boxes_in_prose(rng: random.Random) -> tuple[str, str]:
    number = _n(rng, 99)
    first, last = rng.randint(1, 99), _near(rng, number)
    return rng.choice(
        [
            rf"First \boxed{{{first}}}, but after a check \boxed{{{last}}}.",
            rf"\boxed{{{first}}} \boxed{{{last}}}",
            rf"The roots are \boxed{{{first}}} and \boxed{{{last}}}",
            rf"\fbox{{{last}}}",
            rf"\boxed{{\boxed{{{last}}}}}",
        ]
    ), f"${number}$"


def plain_prose(rng: random.Random) -> tuple[str, str]:
    number = _n(rng, 999)
    other = _near(rng, number)
    return rng.choice(
        [
            f"The answer is {other}.",
            f"There are {_n(rng)} boys and {other} girls, so it is {other}",
            f"answer: {other / 10}",
            f"I get {other} (or about {other + 1}), final answer {other}",
            f"{other}",
            f"-{other}",
            f"{other}/7",
            f"{other} apples",
            f"**{other}**",
            "I do not know.",
        ]
    ), rng.choice([f"${number}$", f"{number}", rf"\boxed{{{number}}}"])


def bare_expressions(rng: random.Random) -> tuple[str, str]:
    number = _n(rng, 30)
    return rng.choice(
        [rf"\frac{{{number}}}{{7}}", rf"\sqrt{{{number}}}", f"{number}x", f"x={number}", f"2^{number}", f"({number}, 1)"]
    ), rng.choice([f"${number}$", rf"$\frac{{{number}}}{{7}}$", rf"$\sqrt{{{number}}}$", f"$({number},1)$"])


def malformed(rng: random.Random) -> tuple[str, str]:
    number = _n(rng, 99)
    return rng.choice(
        [
            rf"\boxed{{\frac{{{number}}}{{2}}",
            rf"$\frac{{{number}}}{{$",
            rf"\boxed{{\sqrt{{{number}}}",
            f"${number}",
            f"$$ {number}",
            rf"\boxed{{}} {number}",
            rf"\boxed{{{number}}}}}}}",
            rf"\boxed {number}",
            rf"$\frac{{}}{{{number}}}$",
            f"${number}//2$",
            f"$x == {number}$",
            f"$((({number}$",
            rf"$\left({number}$",
            f"$√{number}$",
            f"$½ + {number}$",
            f"${number}π$",
            f"$\u2212 {number}$",
            rf"$\unknowncommand{{{number}}}$",
            rf"$\begin{{pmatrix}}{number} & 2$",
            rf"\(${number}$\)",
            f"$\\text{{{number}$",
            f"$&{number}\\\\$",
            f"${number}^^2$",
            f"$_{number}$",
            f"\\boxed{{{number}\n\n}}",
            f"$\\frac{number}2$",
            f"\x00${number}$\x7f",
            f"$\u200b{number}\u200b$",
            "",
            "$$",
            r"\boxed{}",
        ]
    ), rng.choice([f"${number}$", rf"$\frac{{{number}}}{{2}}$", rf"\boxed{{{number}}}"])


def malformed_truths(rng: random.Random) -> tuple[str, str]:
    number = _n(rng, 99)
    return rf"\boxed{{{number}}}", rng.choice(
        [
            f"${number}",
            f"{number} and more",
            rf"\boxed{{{number}",
            rf"$\frac{{{number}}}{{$",
            "nothing to see",
            "",
            "$$",
            rf"$\text{{{number}}}$",
        ]
    )


AS_THEY_ARE = {kind.__name__ for kind in (boxes_in_prose, plain_prose, bare_expressions, malformed, malformed_truths)}
KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        *(integers, decimals, fractions, fractions_and_decimals, mixed_numbers, radicals, rationalised, powers),
        *(roots_of_higher_order, percents, units, money, scientific, polynomials, rearranged, rational_functions),
        *(equations, lines, inequalities, chained_inequalities, intervals, unions, sets, tuples, fractions_in_tuples),
        *(several_solutions, matrices, vectors, complex_numbers, constants, exponentials, logarithms, trigonometry),
        *(counting, factorials, parts_of_numbers, sums, limits_and_infinity, letters_of_algebra, greek, texts, choices),
        *(remainders, bases, ratios, times_and_dates, cases, boxes_in_prose, plain_prose, bare_expressions, malformed),
        malformed_truths,
    )
}
