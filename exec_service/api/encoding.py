"""Encodes messages as JSON: small ones at once, large ones in a thread and in slices, so that the event loop keeps running."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from exec_wire.messages.calls import Result, encode_json
from exec_wire.messages.sessions import Files

LARGE_CHARS = 256 << 10  # in a message's long texts
SLICE_CHARS = 64 << 10
WRITE_BYTES = 256 << 10  # size of one write


async def encode(message: Struct) -> bytes:
    return encode_json(message) if size_of(message) <= LARGE_CHARS else await asyncio.to_thread(in_slices, message)


async def encode_list(results: list[Result]) -> bytes:
    parts = []
    for portion in portions(results):
        parts.append(encode_json(portion)[1:-1] if len(portion) > 1 else await encode(portion[0]))
        await asyncio.sleep(0)  # let other requests run between two portions
    return b"[" + b",".join(parts) + b"]"


async def write_proto(messages: Sequence[Struct], write: Callable[[], bytes]) -> bytes:
    return write() if sum(map(size_of, messages)) <= LARGE_CHARS else await asyncio.to_thread(write)


def portions(results: list[Result]) -> list[list[Result]]:
    """Groups of results for one write each."""
    if len(results) <= 1 or sum(map(size_of, results)) <= WRITE_BYTES:
        return [results] if results else []
    half = len(results) // 2
    return portions(results[:half]) + portions(results[half:])


def size_of(message: Struct) -> int:
    """The size of the fields that a program can fill; 0 for other messages."""
    if isinstance(message, Result):
        shown = sum(len(text) for one in message.display for text in one.data.values()) if message.display else 0
        return len(message.stdout) + len(message.stderr) + shown + sum(map(len, message.files.values()))
    return sum(map(len, message.files.values())) if isinstance(message, Files) else 0


def in_slices(message: Struct) -> bytes:
    """The same bytes as `encode_json`, but other threads run between two slices."""
    return encode_json(_with_encoded_texts(message))


def _with_encoded_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= SLICE_CHARS else _encoded(value)
    if isinstance(value, dict):
        return {key: _with_encoded_texts(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_encoded_texts(one) for one in value]
    if isinstance(value, Struct):
        fields = {name: _with_encoded_texts(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value


def _encoded(text: str) -> Raw:
    slices = (encode_json(text[at : at + SLICE_CHARS])[1:-1] for at in range(0, len(text), SLICE_CHARS))
    return Raw(b"".join((b'"', *slices, b'"')))
