"""The shared memory page: what a program reports of itself besides its output.

    0   1 if the program's last line was reached
    8   length of `value` + 1, 0 if there is none
    16  `value`, the repr of the last expression, UTF-8, cut to what fits

native/python_module.c writes it. The program can write anything to it. The worker reads it when all processes of the sandbox
are dead, with every length bounded, and no verdict depends on it.
"""

import struct
from collections.abc import Callable

SIZE = 65536
_VALUE_AT = 16
MAX_VALUE_BYTES = SIZE - _VALUE_AT


def read(pread: Callable[[int, int], bytes]) -> tuple[bool, str | None]:
    """Returns (completed, value). `pread(size, offset)` reads the page."""
    head = pread(_VALUE_AT, 0)
    completed, length = head[0] == 1, struct.unpack_from("Q", head, 8)[0]
    if not 0 < length <= MAX_VALUE_BYTES + 1:
        return completed, None
    return completed, pread(length - 1, _VALUE_AT).decode("utf-8", "replace")
