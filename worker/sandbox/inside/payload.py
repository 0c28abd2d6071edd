"""The caller's data (code, arguments, environment, files): the worker packs it, the confined child unpacks it.

The first byte tells the form. A program without anything but code travels as plain text; `_zygote.serve` writes it to its file.
Everything else uses marshal: every interpreter has it, it is short, and its reader is a sandboxed process.
"""

import marshal
import os
from typing import NamedTuple

_FORMAT = 2  # understood by every Python 3
_PLAIN, _PACKED = b"p", b"m"  # native/python_module.c


class Payload(NamedTuple):
    """Without a `command` the code is Python. Else it is written to `source`, relative to the program's folder, and the command
    starts; an empty `command[0]` means the compiled program that came as a file. A session has no code yet."""

    code: str
    argv: list[str]
    env: dict[str, str]
    files: dict[str, bytes]
    echo_value: bool
    command: list[str] = []
    source: str = ""
    session: bool = False


Fields = tuple[str, list[str], dict[str, str], dict[str, bytes], bool, list[str], str, bool]  # of a `Payload`, in order


def pack(payload: Payload) -> bytes:
    code, *rest = payload
    if not any(rest):
        return _PLAIN + code.encode("utf-8", "surrogatepass")
    return _PACKED + marshal.dumps(tuple(payload), _FORMAT)


def unpack(data: bytes) -> Fields:
    """`data` is without the first byte. Returns a plain tuple, which touches fewer pages than a `Payload` (program.py)."""
    fields: Fields = marshal.loads(data)
    return fields


def place_files(files: dict[str, bytes], folder: str = "") -> None:
    """Write files; relative paths are below `folder`."""
    for path, content in files.items():
        file_path = os.path.join(folder, path)  # noqa: PTH118 - pathlib is not loaded in a bare zygote
        if parent := os.path.dirname(file_path):  # noqa: PTH120
            os.makedirs(parent, exist_ok=True)  # noqa: PTH103
        with open(file_path, "wb") as file:
            file.write(content)
