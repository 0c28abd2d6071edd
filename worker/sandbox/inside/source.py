"""Used by scripts and cells: compile source, print tracebacks, and turn a SystemExit into an exit code."""

import ast
import sys
import types
from collections.abc import Callable


def compile_with_value(code: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Returns everything before a final expression, and that expression, if there is one."""
    tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
    last: types.CodeType | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        expression = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        last = compile(expression, name, "eval", _future_flags(tree), dont_inherit=True)
    return compile(tree, name, "exec", dont_inherit=True), last


def _future_flags(tree: ast.Module) -> int:
    import __future__

    names = [
        a.name for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__" for a in node.names
    ]
    flags = 0
    for name in names:
        feature = getattr(__future__, name, None)
        flags |= feature.compiler_flag if feature is not None else 0
    return flags


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
