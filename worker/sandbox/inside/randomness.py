"""Reseeds random number generators in a fork, which otherwise repeat the parent's numbers."""

import _random
import functools
import os
import random
import sys
from collections.abc import Callable
from typing import Any


def reseeders() -> list[Callable[[], object]]:
    """One function for every generator that is loaded."""
    generators: list[Any] = [random._inst]
    if (sympy_random := sys.modules.get("sympy.core.random")) is not None:
        generators.append(sympy_random.rng)
    for generator in generators:
        generator.gauss_next = None
    found: list[Callable[[], object]] = [functools.partial(_random.Random.seed, generator) for generator in generators]
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        seed = numpy_random.seed
        found.append(lambda: seed(int.from_bytes(os.urandom(4), "little")))
    return found
