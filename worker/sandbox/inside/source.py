"""Used by scripts and cells: compile source, reseed random numbers, print tracebacks, turn a SystemExit into an exit code."""

import __future__

import _random
import ast
import functools
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any

_FUTURE_FLAGS = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})


def compile_with_value(code: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Returns everything before a final expression, and that expression, if there is one."""
    tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    body = compile(tree, name, "exec", dont_inherit=True)
    if not isinstance(last, ast.Expr):
        return body, None
    return body, compile(ast.Expression(last.value), name, "eval", body.co_flags & _FUTURE_FLAGS, dont_inherit=True)


def reseeders() -> list[Callable[[], object]]:
    """One function for every loaded generator: in a fork it would repeat the parent's numbers."""
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


def show_error(error: BaseException, own_file: str, excepthook: Callable[..., object]) -> int:
    """Print the traceback of the program's own frames, those after `own_file`. Returns the exit code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == own_file:
        trace = trace.tb_next
    error.__traceback__ = trace
    try:
        excepthook(type(error), error, trace)
    except BaseException:
        sys.__excepthook__(type(error), error, trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF if -(2**31) <= error.code < 2**31 else 255
    print(error.code, file=sys.stderr)
    return 1
