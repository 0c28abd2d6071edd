"""What belongs to the caller, packed outside and unpacked by the confined child: code, arguments, environment, files.

A program that has nothing but its code travels as that, behind a byte that says so; `_zygote.serve` puts it at its place and
gives it to the child as it is. For the rest marshal, because both sides are the same few lines, it is in every interpreter, and
its reader is a sandboxed process.
"""

import marshal
from typing import NamedTuple

_FORMAT = 2  # understood by every Python 3
_PLAIN, _PACKED = b"p", b"m"  # native/zygote.c


class Payload(NamedTuple):
    """Without a `command` the code is Python's. Else it is put at `source`, seen from the program's folder, and the command is
    started; an empty `command[0]` stands for the compiled program that came along as a file. A session has no code yet."""

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
    """Of what was packed, without the first byte. A plain tuple: a `Payload` is more to look at (program.py)."""
    fields: Fields = marshal.loads(data)
    return fields
