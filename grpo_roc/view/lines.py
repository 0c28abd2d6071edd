"""Reads a JSONL file while it grows."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TAIL = 256  # bytes


class Line(NamedTuple):
    offset: int
    text: bytes


class GrowingFile:
    """Each `read` gives the lines that are new. An incomplete last line is left for later.

    A resumed run writes its files again. So the end of what was read must still be where it was; else `read` starts again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end, self._tail = 0, b""
        self._seen: tuple[int, ...] = ()

    def read(self) -> tuple[bool, Iterator[Line]]:
        """Whether the file is read from its start, and the new lines; a missing file has none."""
        seen = self._look()
        if seen == self._seen:
            return False, iter(())
        self._seen = seen
        anew = self._end == 0 or self._read_at(self._end - len(self._tail), len(self._tail)) != self._tail
        if anew:
            self._end, self._tail = 0, b""
        return anew, self._lines()

    def line_at(self, offset: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.readline()

    def _look(self) -> tuple[int, ...]:
        try:
            found = os.stat(self.path)  # noqa: PTH116 - called for every file every second
        except FileNotFoundError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read_at(self, offset: int, length: int) -> bytes:
        """Shorter, if the file is."""
        try:
            with open(self.path, "rb") as file:
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError:
            return b""

    def _lines(self) -> Iterator[Line]:
        if not self._seen:
            return
        with open(self.path, "rb") as file:
            file.seek(self._end)
            for text in file:
                if not text.endswith(b"\n"):
                    return
                line = Line(self._end, text)
                self._end, self._tail = self._end + len(text), text[-TAIL:]
                yield line
