"""exec.proto says what our structs say, both ways, and what was once sent can always be read."""

import subprocess
import sys
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from google.protobuf import descriptor_pb2
from msgspec import UNSET, Struct

from exec_wire import proto
from exec_wire.messages import calls as messages
from exec_wire.messages import sessions, stats
from exec_wire.messages.calls import Batch, Call, Display, Limits, Result, Sandbox, Tags, Timings, Usage
from exec_wire.problems import Problem

PROTO = Path(proto.__file__).with_name("exec.proto")
PAIRS: dict[str, type[Struct]] = {
    "CallBatch": Batch,
    "Problem": Problem,
    **{name: getattr(messages, name) for name in ("Call", "Limits", "Tags", "Result", "Usage", "Timings", "Sandbox")},
    **{name: getattr(messages, name) for name in ("Selection", "Cancelled", "Display")},
    **{name: getattr(sessions, name) for name in ("SessionSpec", "Cell", "Fork", "Tenant", "Files", "Fetch")},
    **{name: getattr(sessions, name) for name in ("SessionInfo", "SessionList", "Interrupted", "Ended")},
    **{name: getattr(stats, name) for name in ("Info", "LimitValues", "RequestLimits", "WorkerSummary")},
}
OF_GRPC_ALONE = {"ResultBatch", "Refused", "InfoRequest", "SessionRequest"}
Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {str: Field.TYPE_STRING, float: Field.TYPE_DOUBLE, int: Field.TYPE_INT64, bool: Field.TYPE_BOOL}
EVERYTHING = Call(
    code="x = 1",
    id="a",
    language="cpp",
    stdin="in",
    files={"f": "AAE="},
    fetch_files=["g"],
    limits=Limits(1.5, 2.5, 64, 2, 3, 4),
    env={"A": "b"},
    argv=["1", "2"],
    compile_args=["-O1"],
    deadline_s=7.0,
    tags=Tags("r", 0, "g", "o"),
    tenant="t",
    priority="bulk",
    require_tier="A",
    idempotency_key="k",
    echo_value=True,
)
EVERY_RESULT = Result(
    status="signal",
    blame="infra",
    retryable=True,
    id="a",
    index=3,
    exit_code=0,
    signal=9,
    stdout="é\u2028",
    stderr="err",
    truncated=True,
    value="",
    files={"f": "AAE="},
    usage=Usage(1.0, 2.0, 3, 4),
    timings=Timings(1.0, 2.0, 3.0, 4.0),
    completed=True,
    sandbox=Sandbox("A", ["x", "y"]),
    worker="w",
    error="e",
    request_id="r",
    traceparent="t",
    display=[Display({"text/html": "<b>"})],
    state_kept=False,
)


def test_every_message_has_its_struct() -> None:
    assert set(proto.DECLARED) == set(PAIRS) | OF_GRPC_ALONE


@pytest.mark.parametrize("name", PAIRS)
def test_fields_are_those_of_the_struct_with_the_same_types(name: str) -> None:
    declared = {field.name: field for field in proto.DECLARED[name].field}
    hints = get_type_hints(PAIRS[name])
    assert list(declared) == list(hints), "the same names, in the same order"
    for field, hint in hints.items():
        assert kind_of(declared[field], name) == kind_of_hint(field, hint), f"{name}.{field}"


@pytest.mark.parametrize("name", PAIRS)
def test_a_field_is_optional_if_not_set_means_something_else_than_zero(name: str) -> None:
    declared = {field.name: field for field in proto.DECLARED[name].field}
    for field in msgspec.structs.fields(PAIRS[name]):
        if declared[field.name].type_name or declared[field.name].label == Field.LABEL_REPEATED:
            continue
        special = field.default in (None, UNSET) or (field.default is not msgspec.NODEFAULT and bool(field.default))
        required = name in ("Call", "Cell") and field.name == "code"  # an empty program is a program
        assert declared[field.name].proto3_optional == (special or required), f"{name}.{field.name}"


def kind_of(field: Any, owner: str) -> object:
    kind = field.type_name.rpartition(".")[2]
    entries = {nested.name: nested for nested in proto.DECLARED[owner].nested_type}
    if kind in entries:
        key, value = entries[kind].field
        return dict, key.type, value.type
    one = kind or field.type
    return (list, one) if field.label == Field.LABEL_REPEATED else one


def kind_of_hint(field: str, hint: Any) -> object:
    hint = bare(hint)
    match get_origin(hint):
        case typing.Literal:
            return Field.TYPE_STRING
        case k if k is list:
            return list, kind_of_hint("", get_args(hint)[0])
        case k if k is dict:
            key, value = (kind_of_hint("", part) for part in get_args(hint))
            return dict, key, Field.TYPE_BYTES if field == "files" else value
    return SCALARS.get(hint) or hint.__name__


def bare(hint: Any) -> Any:
    """Without bounds, and without what stands for "not given"."""
    if get_origin(hint) is typing.Annotated:
        return bare(get_args(hint)[0])
    parts = [part for part in get_args(hint) if part not in (type(None), msgspec.UnsetType)]
    return bare(parts[0]) if len(parts) == 1 and get_origin(hint) not in (list, dict, Literal) else hint


def test_the_compiled_file_is_that_of_the_source(tmp_path: Path) -> None:
    out = tmp_path / "exec.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO.parent), f"--descriptor_set_out={out}", str(PROTO)]
    subprocess.run(command, check=True, timeout=60)
    assert out.read_bytes() == PROTO.with_name("exec.binpb").read_bytes(), "run: make proto"


@pytest.mark.parametrize("call", [EVERYTHING, Call(""), Call("x", limits=Limits(wall_s=1), tags=Tags(step=5))])
def test_a_call_survives_the_journey(call: Call) -> None:
    assert msgspec.convert(proto.CALL.read(proto.CALL.write(**proto.plain(call))), Call) == call


@pytest.mark.parametrize("result", [EVERY_RESULT, Result("ok"), Result("error", "model", exit_code=1)])
def test_a_result_survives_the_journey(result: Result) -> None:
    assert msgspec.convert(proto.RESULT.read(proto.RESULT.write(**proto.plain(result))), Result) == result


def test_the_examples_leave_no_field_out() -> None:
    for example in (EVERYTHING, EVERY_RESULT):
        for field in msgspec.structs.fields(type(example)):
            assert getattr(example, field.name) != field.default, field.name


def test_what_older_versions_sent_is_read() -> None:
    call = bytes.fromhex(OLD_CALL)
    assert msgspec.convert(proto.CALL.read(call), Call) == EVERYTHING
    result = bytes.fromhex(OLD_RESULT)
    before_sessions = msgspec.structs.replace(EVERY_RESULT, display=[], state_kept=None)
    assert msgspec.convert(proto.RESULT.read(result), Result) == before_sessions


def test_unknown_fields_of_a_caller_are_named_and_those_of_a_service_ignored() -> None:
    newer = proto.CALL.write(code="x") + b"\xca\x3e\x03new"  # field 1001
    assert proto.CALL.read(newer) == {"code": "x", "field 1001": None}
    assert proto.RESULT.read(proto.RESULT.write(status="ok") + b"\xca\x3e\x03new") == {"status": "ok"}


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="range"):
        proto.CALL.write(**proto.plain(Call("x", tags=Tags(step=1 << 70))))
    with pytest.raises(proto.NotProto):
        proto.CALL.read(b"\xff\xff\xff")
    with pytest.raises(proto.NotProto, match="UTF-8"):
        proto.CALL.read(b"\x0a\x02\xff\xff")


OLD_CALL = (
    "0a0578203d20311201611a036370702202696e2a070a0166120200013201673a1a09000000000000f83f11000000000000044018402002"
    "2803300442060a01411201624a01314a013252032d4f31590000000000001c40620b0a017210001a016722016f6a0174720462756c6b7a"
    "01418201016b880101"
)
OLD_RESULT = (
    "0a067369676e616c1205696e66726118012201612803300038094205c3a9e280a84a0365727250015a0062070a0166120200016a160900"
    "0000000000f03f11000000000000004018032004722409000000000000f03f110000000000000040190000000000000840210000000000"
    "00104078018201090a01411201781201798a010177920101659a010172a2010174"
)


def test_fields_of_messages_in_messages_are_counted_before_they_are_read() -> None:
    limits = b"\x78\x01" * (2 * proto.MOST_IN_PART)  # field 15, which nobody knows
    number = next(field.number for field in proto.DECLARED["Call"].field if field.name == "limits")

    def wrapped(number: int, data: bytes) -> bytes:
        size = len(data)
        varint = bytes((size >> shift & 0x7F) | (0x80 if size >> shift + 7 else 0) for shift in (0, 7, 14) if size >> shift)
        return bytes([number << 3 | 2]) + varint + data

    batch = wrapped(1, wrapped(number, limits))
    assert not proto.CALL_BATCH.has_at_most(batch, 1 << 30, 10)
    assert proto.CALL_BATCH.has_at_most(wrapped(1, wrapped(number, limits[:200])), 1 << 30, 10)
