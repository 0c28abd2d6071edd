"""The shared memory page: the two things that a program says of itself besides its output.

    0   1 if the program's last line was reached
    8   length of `value` + 1, 0 if there is none
    16  `value`, the repr of the last expression, UTF-8, cut to what fits

Written by native/zygote.c. The program can write here whatever it likes. The page is read after everything in the sandbox is
dead, with every length bounded, and no verdict is taken from it.
"""

import struct
from collections.abc import Callable

SIZE = 65536
_VALUE_AT = 16
VALUE_MOST = SIZE - _VALUE_AT


def read(pread: Callable[[int, int], bytes]) -> tuple[bool, str | None]:
    """(completed, value), from a function that reads so many bytes at an offset."""
    head = pread(_VALUE_AT, 0)
    completed, length = head[0] == 1, struct.unpack_from("Q", head, 8)[0]
    if not 0 < length <= VALUE_MOST + 1:
        return completed, None
    return completed, pread(length - 1, _VALUE_AT).decode("utf-8", "replace")
