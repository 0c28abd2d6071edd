"""The messages as protobuf, for the gRPC door and its client: bytes to and from the plain dicts that msgspec converts.

The only module that imports protobuf. `exec.binpb` is `exec.proto` compiled (`make proto`). It is loaded here rather than as
generated code, which demands a protobuf at least as new as the compiler; a trainer's is often older.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from msgspec import Struct

PACKAGE = "exec.v1"
SERVICE = f"{PACKAGE}.Exec"
PROBLEM = "exec-problem-bin"  # trailing metadata of a refusal: the Problem as JSON
CODE = "exec-code"  # and its code alone, for people

Read = Callable[[Any], dict[str, Any]]
_FieldProto = descriptor_pb2.FieldDescriptorProto


class NotProto(ValueError):
    """Bytes that are no such message."""


class Message:
    """One kind of message. Dicts hold only what is set; files are base64 in them, as in our structs."""

    def __init__(self, name: str) -> None:
        self._class = message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        self._read = _reader(name)

    def read(self, data: bytes) -> dict[str, Any]:
        try:
            return self._read(self._class.FromString(data))
        except DecodeError as error:
            raise NotProto(str(error)) from None

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
    pool = descriptor_pool.DescriptorPool()  # of our own: nobody else's exec.proto can be in the way
    pool.Add(file)
    return file.SerializeToString(), pool, {message.name: message for message in file.message_type}


def _reader(name: str) -> Read:
    """A function that makes a dict of a message. What kind each field is, is found out here and not for every message;
    asking the message for what is set (`ListFields`) takes half as long again."""
    scalars: list[str] = []
    optional: list[str] = []
    messages: list[tuple[str, Read]] = []
    lists: list[tuple[str, Callable[[Any], Any]]] = []
    for field in DECLARED[name].field:
        kind = field.type_name.rpartition(".")[2]
        if field.label == _FieldProto.LABEL_REPEATED:
            lists.append((field.name, _list_reader(name, kind) if kind else list))
        elif kind:
            messages.append((field.name, _reader(kind)))
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
        return fields

    return read


def _list_reader(owner: str, kind: str) -> Callable[[Any], Any]:
    entries = [nested for nested in DECLARED[owner].nested_type if nested.name == kind]
    if not entries:
        read = _reader(kind)
        return lambda values: [read(value) for value in values]
    if entries[0].field[1].type == _FieldProto.TYPE_BYTES:
        return lambda values: {key: base64.b64encode(value).decode() for key, value in values.items()}
    return dict


FILE, POOL, DECLARED = _load()
CALL, CALL_BATCH = Message("Call"), Message("CallBatch")
RESULT, RESULT_BATCH = Message("Result"), Message("ResultBatch")
SELECTION, CANCELLED = Message("Selection"), Message("Cancelled")
INFO_REQUEST, INFO = Message("InfoRequest"), Message("Info")
SESSION_SPEC, SESSION_REQUEST = Message("SessionSpec"), Message("SessionRequest")
SESSION_INFO, SESSION_LIST, FILES = Message("SessionInfo"), Message("SessionList"), Message("Files")
INTERRUPTED, ENDED = Message("Interrupted"), Message("Ended")
