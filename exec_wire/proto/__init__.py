"""The messages as protobuf, for the gRPC endpoint and its client: bytes to and from the plain dicts that msgspec converts.

The only module that imports protobuf. `exec.binpb` is `exec.proto` compiled (`make proto`). It is loaded here rather than as
generated code, which demands a protobuf at least as new as the compiler; a trainer's is often older.
"""

import base64
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import Struct

from exec_wire.messages.bounds import MOST

PACKAGE = "exec.v1"
SERVICE = f"{PACKAGE}.Exec"
PROBLEM = "exec-problem-bin"  # trailing metadata of a refusal: the Problem as JSON
CODE = "exec-code"  # and its code alone, for people

MOST_IN_PART = 4 * MOST.files + 100  # fields of one call: files, paths, variables, arguments and the rest

Read = Callable[[Any], dict[str, Any]]
_FieldProto = descriptor_pb2.FieldDescriptorProto


class NotProto(ValueError):
    """Bytes that are no such message."""


class Message:
    """One kind of message. Dicts hold only what is set; files are base64 in them, as in our structs."""

    def __init__(self, name: str, *, of_callers: bool = False) -> None:
        """`of_callers`: fields that our exec.proto does not have are read as members such as `field 99`."""
        self._class = message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        self._read = _reader(name, of_callers)
        self._name = name

    def read(self, data: bytes) -> dict[str, Any]:
        try:
            return self._read(self._class.FromString(data))
        except DecodeError as error:
            raise NotProto(str(error)) from None

    def has_at_most(self, data: bytes, most: int, most_parts: int) -> bool:
        """Whether the message has at most `most` fields, nested ones included, and `most_parts` nested messages. Counts before
        parsing and stops at the bound. In invalid bytes, the fields before the fault count."""
        left, parts = most, _parts(self._name)
        for number, start, end in _fields(data, 0, len(data)):
            left -= 1
            if number in parts:
                most_parts -= 1
                inside = _count(data, start, end, parts[number], MOST_IN_PART)
                if inside > MOST_IN_PART:
                    return False
                left -= inside
            if left < 0 or most_parts < 0:
                return False
        return True

    def write(self, **fields: Any) -> bytes:
        """Raises `ValueError` or `TypeError` for what does not fit, such as a number of more than 64 bits."""
        data: bytes = self._class(**fields).SerializeToString()
        return data


def plain(struct: Struct) -> dict[str, Any]:
    """A struct as the fields of its message."""
    fields: dict[str, Any] = msgspec.to_builtins(struct)
    if files := fields.get("files"):
        fields["files"] = {path: base64.b64decode(content) for path, content in files.items()}
    return fields


def _load() -> tuple[bytes, Any, dict[str, Any]]:
    [file] = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("exec.binpb").read_bytes()).file
    pool = descriptor_pool.DescriptorPool()  # of our own: it cannot clash with another library's exec.proto
    pool.Add(file)
    return file.SerializeToString(), pool, {message.name: message for message in file.message_type}


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each field of one message, up to the first invalid one."""
    while at < end:
        if at + 1 < end and data[at] < 0x80 and data[at] & 7 == 2 and data[at + 1] < 0x80:  # most are short
            tag, start = data[at], at + 2
            at = start + data[at + 1]
            if at > end:
                return
            yield tag >> 3, start, at
            continue
        tag, at = _varint(data, at)
        start = at
        if tag & 7 == 0:
            _, at = _varint(data, at)
        elif tag & 7 == 2:
            size, start = _varint(data, at)
            at = start + size
        else:  # fixed sizes; a group's begin and end are fields without contents
            at += {1: 8, 5: 4}.get(tag & 7, 0)
        if at > end:
            return
        yield tag >> 3, start, at


@cache
def _parts(name: str) -> dict[int, str]:
    """The fields that are messages, and of which kind."""
    maps = {nested.name for nested in DECLARED[name].nested_type}
    kinds = {field.number: field.type_name.rpartition(".")[2] for field in DECLARED[name].field if field.type_name}
    return {number: kind for number, kind in kinds.items() if kind not in maps}


def _count(data: bytes, at: int, end: int, name: str, most: int) -> int:
    """The number of fields, nested ones included; stops counting above `most`."""
    count, parts = 0, _parts(name)
    for number, start, stop in _fields(data, at, end):
        count += 1
        if number in parts and count <= most:
            count += _count(data, start, stop, parts[number], most - count)
        if count > most:
            break
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return value, len(data) + 1


def _reader(name: str, of_callers: bool = False) -> Read:
    """A function that turns a message into a dict. It knows the kinds of the fields in advance: `ListFields` takes half as
    long again."""
    scalars: list[str] = []
    optional: list[str] = []
    messages: list[tuple[str, Read]] = []
    lists: list[tuple[str, Callable[[Any], Any]]] = []
    for field in DECLARED[name].field:
        kind = field.type_name.rpartition(".")[2]
        if field.label == _FieldProto.LABEL_REPEATED:
            lists.append((field.name, _list_reader(name, kind, of_callers) if kind else list))
        elif kind:
            messages.append((field.name, _reader(kind, of_callers)))
        else:
            (optional if field.proto3_optional else scalars).append(field.name)

    def read(message: Any) -> dict[str, Any]:
        fields = {}
        for name in scalars:
            if value := getattr(message, name):
                fields[name] = value
        is_set = message.HasField
        for name in optional:
            if is_set(name):
                fields[name] = getattr(message, name)
        for name, read_part in messages:
            if is_set(name):
                fields[name] = read_part(getattr(message, name))
        for name, read_all in lists:
            if values := getattr(message, name):
                fields[name] = read_all(values)
        if of_callers and len(unknown := UnknownFieldSet(message)):
            fields.update((f"field {part.field_number}", None) for part in unknown)
        return fields

    return read


def _list_reader(owner: str, kind: str, of_callers: bool) -> Callable[[Any], Any]:
    entries = [nested for nested in DECLARED[owner].nested_type if nested.name == kind]
    if not entries:
        read = _reader(kind, of_callers)
        return lambda values: [read(value) for value in values]
    if entries[0].field[1].type == _FieldProto.TYPE_BYTES:
        return lambda values: {key: base64.b64encode(value).decode() for key, value in values.items()}
    return dict


FILE, POOL, DECLARED = _load()
CALL, CALL_BATCH = Message("Call", of_callers=True), Message("CallBatch", of_callers=True)
RESULT, RESULT_BATCH = Message("Result"), Message("ResultBatch")
SELECTION, CANCELLED = Message("Selection", of_callers=True), Message("Cancelled")
INFO_REQUEST, INFO = Message("InfoRequest"), Message("Info")
SESSION_SPEC, SESSION_REQUEST = Message("SessionSpec", of_callers=True), Message("SessionRequest", of_callers=True)
SESSION_INFO, SESSION_LIST, FILES = Message("SessionInfo"), Message("SessionList"), Message("Files")
INTERRUPTED, ENDED = Message("Interrupted"), Message("Ended")
