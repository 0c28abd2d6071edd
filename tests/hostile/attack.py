"""What hostile programs share; it is sent along with each program that imports it.

A program tries things that must be refused and tells what it achieved: `contained`, or `escaped: ...`.
"""

import ctypes
import errno
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
achieved: list[str] = []


def syscall(number, *arguments):
    """The kernel itself, past libc's wrappers; raises OSError as Python's own functions do."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    got = libc.syscall(ctypes.c_long(number), *wide)
    if got == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got


def buffer(size=256):
    return ctypes.create_string_buffer(size)


def escaped(what):
    achieved.append(str(what))


def attempt(what, do, *arguments, by=()):
    """It must fail. `by`: with one of these error numbers, if it matters which layer refuses it."""
    try:
        do(*arguments)
    except OSError as error:
        if by and error.errno not in by:
            escaped(f"{what} ended with {errno.errorcode.get(error.errno, error.errno)}")
    except (ValueError, MemoryError, RuntimeError):
        pass
    else:
        escaped(what)


def tell():
    print("escaped: " + "; ".join(achieved) if achieved else "contained", flush=True)
