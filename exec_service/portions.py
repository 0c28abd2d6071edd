"""Results that are ready together leave in one write; in several when they are much."""

from __future__ import annotations

from exec_wire.messages import Result

WRITE_BYTES = 256 << 10  # a portion is written when it has reached this size


def portions(results: list[Result]) -> list[list[Result]]:
    if len(results) == 1 or sum(map(_size, results)) <= WRITE_BYTES:
        return [results]
    half = len(results) // 2
    return portions(results[:half]) + portions(results[half:])


def _size(result: Result) -> int:
    return len(result.stdout) + len(result.stderr) + sum(map(len, result.files.values()))
