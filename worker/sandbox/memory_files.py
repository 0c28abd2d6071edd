"""Memory files (memfd) that carry a program's input and output, and their contents as text."""

import base64
import codecs
import errno
import fcntl
import os

from worker.sandbox.inside.payload import PAGE_BYTES, Payload, pack

MFD_EXEC = 0x10
SLICE_BYTES = 192 << 10  # decoded or encoded in one go; other threads wait for under a millisecond
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def sealed(name: str, data: bytes, flags: int = 0) -> int:
    """A memory file that no process can change."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    except OSError as error:
        if error.errno != errno.EINVAL or not flags:
            raise
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # kernels before 6.3 do not know MFD_EXEC
    _write_all(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _write_all(fd: int, data: bytes, at: int = 0) -> None:
    """Closes `fd` on failure."""
    try:
        written = os.pwrite(fd, data, at)
        while written < len(data):  # more than two gigabytes, or nearly out of memory
            written += os.pwrite(fd, memoryview(data)[written:], at + written)
    except OSError:
        os.close(fd)
        raise


def output(name: str) -> int:
    """All processes in the sandbox append to it. The worker reads it once, when they are dead: no draining, no blocking."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def page_file(payload: Payload) -> int:
    """The page, followed by the payload that the child reads before its program begins."""
    fd = os.memfd_create("page", os.MFD_CLOEXEC)
    _write_all(fd, pack(payload), PAGE_BYTES)
    return fd


def text(fd: int, size: int, cap: int) -> tuple[str, bool]:
    """A stream as text. Beyond `cap` bytes: its head and tail, with the cut marked."""
    if not size:
        return "", False
    if size <= cap:
        return _text_at(fd, size, 0), False
    half = cap // 2
    head, tail = _text_at(fd, cap - half, 0), _text_at(fd, half, size - half)
    return f"{head}\n[... {size - cap} bytes cut ...]\n{tail}", True


def _text_at(fd: int, size: int, at: int) -> str:
    if size <= SLICE_BYTES:
        return os.pread(fd, size, at).decode("utf-8", "replace")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [decoder.decode(os.pread(fd, min(SLICE_BYTES, size - done), at + done)) for done in range(0, size, SLICE_BYTES)]
    return "".join((*parts, decoder.decode(b"", final=True)))


def utf8_size(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(len(text[at : at + SLICE_BYTES].encode()) for at in range(0, len(text), SLICE_BYTES))


def base64_of(content: bytes) -> str:
    if len(content) <= SLICE_BYTES:
        return base64.b64encode(content).decode()
    view = memoryview(content)
    return "".join(base64.b64encode(view[at : at + SLICE_BYTES]).decode() for at in range(0, len(view), SLICE_BYTES))


def close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
