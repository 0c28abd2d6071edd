"""The file that worker and program share: a page, on which the program reports, and behind it the caller's data.

The data (code, arguments, environment, files) is packed by the worker and unpacked by the confined child. The first byte tells
the form. A program without anything but code travels as plain text; `_zygote.serve` writes it to its file. Everything else uses
marshal: every interpreter has it, it is short, and its reader is a sandboxed process.

The page is what a program reports of itself besides its output:

    0   1 if the program's last line was reached
    8   length of `value` + 1, 0 if there is none
    16  `value`, the repr of the last expression, UTF-8, cut to what fits

native/python_module.c writes it. The program can write anything to it. The worker reads it when all processes of the sandbox
are dead, with every length bounded, and no verdict depends on it.
"""

import marshal
import os
import sys
from typing import NamedTuple

_FORMAT = 2  # understood by every Python 3
_PLAIN, _PACKED = b"p", b"m"  # native/python_module.c
PAGE_BYTES = 65536
_VALUE_AT = 16


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


def pack(payload: Payload) -> bytes:
    code, *rest = payload
    if not any(rest):
        return _PLAIN + code.encode("utf-8", "surrogatepass")
    return _PACKED + marshal.dumps(tuple(payload), _FORMAT)


def read_page(fd: int) -> tuple[bool, str | None]:
    """Returns (completed, value)."""
    head = os.pread(fd, _VALUE_AT, 0)
    completed, length = head[0] == 1, int.from_bytes(head[8:], sys.byteorder)
    if not 0 < length <= PAGE_BYTES - _VALUE_AT + 1:
        return completed, None
    return completed, os.pread(fd, length - 1, _VALUE_AT).decode("utf-8", "replace")


def place_files(files: dict[str, bytes], folder: str = "") -> None:
    """Write files; relative paths are below `folder`."""
    for path, content in files.items():
        file_path = os.path.join(folder, path)  # noqa: PTH118 - pathlib is not loaded in a bare zygote
        if parent := os.path.dirname(file_path):  # noqa: PTH120
            os.makedirs(parent, exist_ok=True)  # noqa: PTH103
        with open(file_path, "wb") as file:
            file.write(content)
