"""Python programs that wrap those of callers: one calls a function, one runs a checker.

The sandbox of a function gets the arguments and returns the value in a file. That file is as untrusted as any output: the
gateway compares it with the expected value, which the sandbox never gets.
"""

import base64
import json
import re
from typing import Any

RETURNED = "returned.json"
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
# A value whose JSON is so much longer than the expected one cannot be equal to it: a number has at most 25 characters.
MUCH_LONGER, SHORT_CHARS = 32, 1024

_HARNESS = """\
import json, os, sys, types

SOURCE = {source}

def plain(value):
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    raise TypeError(f"{{FUNCTION}} returned a {{type(value).__name__}}, which JSON does not have")

def main(function, load=json.load, dumps=json.dumps, write=open):
    arguments = load(sys.stdin)
    path = os.path.abspath("solution.py")
    with write(path, "w", encoding="utf-8") as file:
        file.write(SOURCE)
    target = module = sys.modules["solution"] = types.ModuleType("solution")
    module.__file__ = path
    exec(compile(SOURCE, path, "exec", dont_inherit=True), module.__dict__)
    *owners, name = function.split(".")
    for owner in owners:
        target = getattr(target, owner)
        target = target() if isinstance(target, type) else target
    call = getattr(target, name)
    value = call(**arguments) if isinstance(arguments, dict) else call(*arguments)
    text = dumps(value, default=plain)
    with write({returned!r}, "w") as file:
        file.write(text)

FUNCTION = {function!r}
main(FUNCTION)
"""
_CHECKER = """\
import sys, traceback

SOURCE = {source}

try:
    exec(compile(SOURCE, "checker.py", "exec", dont_inherit=True), {{"__name__": "__main__", "__builtins__": __builtins__}})
except SystemExit:
    raise
except BaseException:  # Python would exit with 1, which is a verdict
    traceback.print_exc()
    sys.exit(3)
"""


def is_name(text: str) -> bool:
    """`solve`, or `Solution.solve`: a method of an object that is created without arguments."""
    return _NAME.fullmatch(text) is not None


def harness(code: str, function: str) -> str:
    """A program that calls `function` of `code` with the arguments on stdin."""
    return _HARNESS.format(source=quoted(code), function=function, returned=RETURNED)


def python_checker(code: str) -> str:
    """A program that exits with 1 only if `code` does so itself."""
    return _CHECKER.format(source=quoted(code))


def quoted(code: str) -> str:
    """A literal with the same lines: a worker picks the profile by the imports at the beginnings of lines."""
    escaped = code.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "\\r").replace("\0", "\\x00")
    return f'"""\\\n{escaped}"""'


def arguments(text: str) -> Any:
    """Raises `ValueError` if it is not a JSON list or object."""
    value = load(text)
    if not isinstance(value, list | dict):
        raise ValueError("the arguments must be a JSON list, or an object of keywords")
    return value


def load(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def returned_text(files: dict[str, str]) -> str | None:
    """The returned value as JSON; None if the function did not return."""
    encoded = files.get(RETURNED)
    return None if encoded is None else base64.b64decode(encoded).decode("utf-8", "replace")


def far_longer(text: str, expected: str) -> bool:
    return len(text) > SHORT_CHARS + MUCH_LONGER * len(expected)
