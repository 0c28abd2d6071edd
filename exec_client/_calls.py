"""Makes a checked Call of the user's arguments."""

import base64
from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar
from uuid import uuid4

import msgspec

from exec_client.errors import BadRequest, UnknownArgument
from exec_wire import Call, Limits, Priority, Selection, Tags, encode_json
from exec_wire.messages.unknown_fields import Reader, UnknownFields, suggestion
from exec_wire.problems import PROBLEMS

M = TypeVar("M", bound=msgspec.Struct)
F = TypeVar("F", bound=Mapping[str, object])
_CALL = Reader(Call)


class CommonFields(TypedDict, total=False):
    id: str
    deadline_s: float
    tags: Tags
    tenant: str
    priority: Priority


class ProgramFields(CommonFields, total=False):
    language: str
    limits: Limits
    compile_args: list[str]
    require_tier: str


class CallFields(ProgramFields, total=False):
    """The fields of `exec_wire.Call` as keywords of `run`; a test compares the two."""

    stdin: str
    files: Mapping[str, str | bytes]  # str: base64 as on the wire; bytes: encoded here
    fetch_files: list[str]
    env: dict[str, str]
    argv: list[str]
    idempotency_key: str
    echo_value: bool


def make_call(call: Call | str, fields: CallFields) -> tuple[Call, int]:
    """The call with an idempotency key, as `make` makes it; and its size in bytes."""
    if not isinstance(call, Call | str):
        raise TypeError(f"a call is a str of code or an exec_wire.Call, not {type(call).__name__}")
    given, key = ((call,), "") if isinstance(call, str) else (call, call.idempotency_key)
    keyed = fields if fields.get("idempotency_key", key) else {**fields, "idempotency_key": uuid4().hex}
    return make(_CALL, given, keyed)


def make(reader: Reader[M], given: M | tuple[str, ...], fields: Mapping[str, Any]) -> tuple[M, int]:
    """The message with `fields` put over it, checked; and its size in bytes. `given`: the message, or its first fields.

    Checked here because Structs do not check themselves when they are built, because one call that cannot be encoded
    (a lone surrogate in a model's code) must not spoil the request that it shares with others, and because the copy that
    the check makes does not change when the user changes a dict afterwards. Costs about 5 µs.
    """
    changes = dict(known(fields, reader.kind))
    if "files" in changes:
        changes["files"] = encoded_files(changes["files"])
    made = reader.kind(*given, **changes) if isinstance(given, tuple) else msgspec.structs.replace(given, **changes)
    return checked(made, reader)


def make_selection(run: str | None, step: int | None, group: str | None, rollout: str | None, tenant: str) -> Selection:
    """Checked here because an empty value would select every call without that tag."""
    values = {"run": run, "step": step, "group": group, "rollout": rollout, "tenant": tenant}
    status = PROBLEMS["bad_query"][0]
    try:
        selection = msgspec.convert({name: value for name, value in values.items() if value is not None}, Selection)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), code="bad_query", field=_named_field(error), status=status) from error
    if not selection.names_a_tag:
        raise BadRequest("give at least one of run, step, group and rollout", code="bad_query", status=status)
    return selection


def encoded_files(files: Mapping[str, str | bytes]) -> dict[str, str]:
    """str contents are base64 as on the wire."""
    return {path: text if isinstance(text, str) else base64.b64encode(text).decode() for path, text in files.items()}


def known(fields: F, message: type[msgspec.Struct]) -> F:
    """The keywords as they are, if the message has a field for each."""
    for name in fields:
        if name not in message.__struct_fields__:
            hint = f", did you mean limits=Limits({name}=…)?" if name in Limits.__struct_fields__ else ""
            hint = hint or suggestion(name, message.__struct_fields__)
            raise UnknownArgument(f"{name}: unknown argument{hint}", code="bad_field", field=f"$.{name}")
    return fields


def checked(message: M, reader: Reader[M]) -> tuple[M, int]:
    """The message as the service will read it, and its size in bytes."""
    try:
        encoded = encode_json(message)
        made, unknown = reader.read(encoded)
        if unknown:  # in a dict that was given in place of a struct
            [first, *_] = UnknownFields().of(reader.kind, encoded)
            raise UnknownArgument(first, code="bad_field", field=f"$.{first.partition(':')[0]}")
        return made, len(encoded)
    except BadRequest:
        raise
    except (ValueError, TypeError) as error:
        status = PROBLEMS["bad_field"][0]
        raise BadRequest(str(error), code="bad_field", field=_field(message, error), status=status) from error


def _field(message: msgspec.Struct, error: Exception) -> str:
    """Where it is wrong: msgspec says so when it decodes; what it cannot encode has to be looked for."""
    if isinstance(error, msgspec.ValidationError):
        return _named_field(error)
    for name in message.__struct_fields__:
        try:
            encode_json(getattr(message, name))
        except (ValueError, TypeError):
            return f"$.{name}"
    return "$"


def _named_field(error: msgspec.ValidationError) -> str:
    return str(error).rpartition(" - at `")[2].rstrip("`") if " - at `" in str(error) else "$"
