"""Confidence intervals of paired differences, without scipy."""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class Interval(NamedTuple):
    mean: float
    half: float  # of the interval's width; infinite with fewer than two values

    @property
    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half:.3f}" if math.isfinite(self.half) else f"{self.mean:+.3f}"


def interval(values: Sequence[float], level: float) -> Interval:
    """Student's interval for the mean."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(mean, math.inf)
    return Interval(mean, t_quantile(0.5 + level / 2, count - 1) * statistics.stdev(values) / math.sqrt(count))


@cache
def t_quantile(share: float, degrees: int) -> float:
    """The value below which Student's t is with this probability, for shares above one half."""
    low, high = 0.0, 1.0
    while _t_share(high, degrees) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, degrees) < share else (low, middle)
    return high


def _t_share(value: float, degrees: int, steps: int = 400) -> float:
    """P(T < value): with T = sqrt(degrees) tan(angle), the density of the angle is cos(angle)^(degrees - 1), up to a factor."""
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    end = math.atan(value / math.sqrt(degrees))
    weights = (1 if place in (0, steps) else 4 if place % 2 else 2 for place in range(steps + 1))  # Simpson's rule
    total = sum(weight * math.cos(end * place / steps) ** (degrees - 1) for place, weight in enumerate(weights))
    return 0.5 + factor * total * end / steps / 3
