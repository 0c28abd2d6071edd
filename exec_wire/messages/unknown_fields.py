"""Decoding of messages that reports unknown fields.

Unknown fields are accepted and reported: an older service accepts a newer client's message, and a misspelt name is not silent.
Decoding is strict first, at the price of plain decoding. Only a message that fails there is decoded again and searched.
"""

import difflib
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Raw, Struct

MOST_PER_MESSAGE = 8
MOST_HINTS = 64  # that are looked for in one request: each takes some 100 µs

S = TypeVar("S", bound=Struct)
_object = msgspec.json.Decoder(dict[str, Raw] | None).decode
_list = msgspec.json.Decoder(list[Raw] | None).decode


@functools.cache
def strict(kind: type[S]) -> type[S]:
    """A subclass that refuses unknown fields when it is decoded, also in the structs inside it. It is encoded as `kind` is."""
    changed = []
    for field in msgspec.structs.fields(kind):
        if (hint := _strict_hint(field.type)) != field.type:
            changed.append((field.name, hint, _strict_default(field)))
    made: Any = msgspec.defstruct(kind.__name__, changed, bases=(kind,), module=kind.__module__, forbid_unknown_fields=True)
    return made  # type: ignore[no-any-return]


def _strict_hint(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return strict(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = _strict_hint(arguments[0])
        return hint if inner == arguments[0] else Annotated[(inner, *arguments[1:])]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_strict_hint, arguments))
    return list[_strict_hint(arguments[0])] if origin is list else hint  # type: ignore[misc]


def _strict_default(field: msgspec.structs.FieldInfo) -> Any:
    if isinstance(field.default, Struct):
        return strict(type(field.default))(*(getattr(field.default, name) for name in field.default.__struct_fields__))
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return field.default


class Reader(Generic[S]):
    """Reads one kind of message, from JSON or from what another decoder has made of it, and reports unknown fields."""

    def __init__(self, kind: type[S]) -> None:
        self.kind = kind
        self.decode_strictly: Callable[[bytes], S] = msgspec.json.Decoder(strict(kind)).decode
        self._decode: Callable[[bytes], S] = msgspec.json.Decoder(kind).decode

    def read(self, data: bytes | dict[str, Any]) -> tuple[S, bool]:
        """The message, and whether it has unknown fields."""
        try:
            if isinstance(data, bytes):
                return self.decode_strictly(data), False
            return msgspec.convert(data, strict(self.kind)), False
        except msgspec.ValidationError:
            if isinstance(data, bytes):
                data.decode()  # UTF-8 errors in unknown names raise here
            return (self._decode(data) if isinstance(data, bytes) else msgspec.convert(data, self.kind)), True


class UnknownFields:
    """Finds the unknown fields of the messages of one request."""

    def __init__(self) -> None:
        self._hints: dict[tuple[type[Struct], str], str] = {}

    def of(self, kind: type[Struct], data: Any, but: str = "") -> list[str]:
        """Warnings, such as `limits.wall: unknown field, did you mean wall_s?`. The field `but` is not looked into."""
        found: list[str] = []
        for warning in self._walk(kind, data, "", but):
            if len(found) == MOST_PER_MESSAGE:
                return [*found, "there are more unknown fields"]
            found.append(warning)
        return found

    def _walk(self, kind: type[Struct], data: Any, at: str, but: str) -> Iterator[str]:
        inner = _inner(kind)
        for name, part in members(data).items():
            if name not in inner:
                yield f"{at}{name[:80]}: unknown field{self._hint(kind, name)}"
            elif name != but and (struct := inner[name]) is not None:
                for index, item in items(part) if isinstance(struct, list) else [(None, part)]:
                    where = f"{at}{name}." if index is None else f"{at}{name}[{index}]."
                    yield from self._walk(struct[0] if isinstance(struct, list) else struct, item, where, "")

    def _hint(self, kind: type[Struct], name: str) -> str:
        if len(self._hints) >= MOST_HINTS and (kind, name) not in self._hints:
            return ""
        return self._hints.setdefault((kind, name), suggestion(name, kind.__struct_fields__))


def members(data: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] | None = data if isinstance(data, Mapping) or data is None else _object(data)
    return found or {}


def items(data: Any) -> Iterable[tuple[int, Any]]:
    return enumerate((data if isinstance(data, list) or data is None else _list(data)) or [])


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`, did you mean wall_s?`, or nothing if nothing is like it. All names begin with `prefix`."""
    near = difflib.get_close_matches(name[len(prefix) :][:80], [other.removeprefix(prefix) for other in known], 1)
    return f", did you mean {prefix}{near[0]}?" if near else ""


@functools.cache
def _inner(kind: type[Struct]) -> dict[str, Any]:
    """The known names; with each the struct that is in it, as a list of one if there are several, or None."""
    return {field.name: _struct_in(field.type) for field in msgspec.structs.fields(kind)}


def _struct_in(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        found = _struct_in(arguments[0])
        return None if found is None else [found]
    if origin in (Annotated, Union, types.UnionType):
        return next((found for argument in arguments if (found := _struct_in(argument)) is not None), None)
    return None
