"""Turns request bodies into calls, or into a refusal that names the field.

The messages (`exec_wire.messages.calls`) declare types and ranges, `exec_wire.messages.bounds` how much a field may hold; this
module checks the rest.
"""

import binascii
import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from exec_service.config import GatewayConfig
from exec_service.dispatch.workers import WorkerRegistry, strength
from exec_service.judging.harnesses import arguments, is_name, load
from exec_service.refusals import Refusal
from exec_wire.messages import bounds
from exec_wire.messages.bounds import WrongField, quote
from exec_wire.messages.calls import Batch, Call, Limits, Selection
from exec_wire.messages.judging import Judge, Test, Verify, VerifyBatch
from exec_wire.messages.sessions import Cell, Fetch, Files, Fork, SessionSpec, Tenant
from exec_wire.messages.unknown_fields import Reader, UnknownFields, items, members, strict

MAX_DETAIL_CHARS = 300
SMALL_BYTES = 256 << 10  # a smaller body cannot have too many parts to decode at once
MOST_INDEXES = 4096  # of a `Selection`

Warnings = dict[int, list[str]]
"""Warnings by the index of a call in its request; 0 for a single call."""

CALL, BATCH, JUDGE, VERIFY, VERIFY_BATCH = Reader(Call), Reader(Batch), Reader(Judge), Reader(Verify), Reader(VerifyBatch)
SESSION, CELL, FORK, TENANT = Reader(SessionSpec), Reader(Cell), Reader(Fork), Reader(Tenant)
FILES, FETCH, SELECTION = Reader(Files), Reader(Fetch), Reader(Selection)

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key` in `)?(?P<path>\$.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")

B = TypeVar("B")
T = TypeVar("T")
Q = TypeVar("Q", bound=msgspec.Struct)


_FIELDS = "calls tests items files fetch_files env argv args cells submissions"  # fields of all routes that hold many parts
_Outline = msgspec.defstruct("_Outline", [(name, msgspec.Raw, msgspec.Raw()) for name in _FIELDS.split()])
_decode_outline: Callable[[bytes], Any] = msgspec.json.Decoder(_Outline).decode
_scan = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str).raw_decode
_GAP = re.compile(r"[\s,]*")


class Validator:
    """Checks calls against the gateway's settings and the live workers. The readers add unknown fields to `warnings`."""

    def __init__(self, worker_registry: WorkerRegistry, config: GatewayConfig) -> None:
        self._worker_registry, self._bounds = worker_registry, config.bounds
        self._max_calls, self._max_output_kb = config.max_calls_per_request, config.max_output_kb

    def read_call(self, body: bytes | dict[str, Any], warnings: Warnings) -> Call:
        try:
            call = CALL.decode_strictly(body) if isinstance(body, bytes) else msgspec.convert(body, strict(Call))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            call = read(CALL, body, warnings)  # names what is wrong, or warns of unknown fields
        self.check(call, "$")
        return call

    def read_batch(self, body: bytes | dict[str, Any], warnings: Warnings) -> list[Call]:
        batch, warned = _read(BATCH, body)
        self.check_number(len(batch.calls), "calls")
        for index, call in enumerate(batch.calls):
            self.check(call, f"$.calls[{index}]")
        if warned:
            _warn_each(Batch, body, "calls", Call, warnings)
        return batch.calls

    def read_judge(self, body: bytes, warnings: Warnings) -> Judge:
        if len(body) > SMALL_BYTES:
            self._check_tests(body)
        judge = read(JUDGE, body, warnings)
        self.check_number(len(judge.tests), "tests")
        self._check_language(judge.language, "$.language")
        if judge.require_tier:
            self._check_tier(judge.require_tier, "$.require_tier")
        if judge.checker.kind == "program":
            self._check_language(judge.checker.language, "$.checker.language")
            if not judge.checker.code:
                raise Refusal("bad_field", "a checker of the kind program needs its code", field="$.checker.code")
        with named("$"):
            bounds.check_arguments(judge.compile_args, self._bounds, "compile_args")
        if judge.function:
            _check_function(judge)
        self.check_limits(judge.limits, "$.limits")
        for index, test in enumerate(judge.tests):
            at = f"$.tests[{index}]"
            if test.limits is not None:
                self.check_limits(test.limits, f"{at}.limits")
            if test.argv:
                with named(at):
                    bounds.check_arguments(test.argv, self._bounds)
            if judge.function:
                _check_function_test(test, at)
        return judge

    def _check_tests(self, body: bytes) -> None:
        """Count the tests of a large body before decoding them: an empty test is two bytes of JSON and a hundred decoded."""
        tests, fit = bytes(decode(_decode_outline, body).tests), partial(_has_at_most, most=self._max_calls)
        if tests.startswith(b"[") and tests.count(b"{") > self._max_calls and not decode(fit, tests):
            raise Refusal("too_many_calls", f"more than {self._max_calls} tests; no more fit in one request", field="$.tests")

    def read_session(self, body: bytes | dict[str, Any], warnings: Warnings) -> SessionSpec:
        if isinstance(body, dict) and "limits" in body:  # unset limits have the defaults of a session, not of a call
            body["limits"] = msgspec.to_builtins(SessionSpec().limits) | body["limits"]
        spec = read(SESSION, body, warnings)
        if spec.profile and self._worker_registry.alive and spec.profile not in (known := self._worker_registry.profiles):
            raise Refusal("bad_field", f"{quote(spec.profile)} is not one of {', '.join(known)}", field="$.profile")
        self.check_limits(spec.limits, "$.limits")
        with named("$"):
            bounds.check_variables(spec.env, self._bounds)
        self._check_files(spec.files, "$", home="")
        return spec

    def read_files(self, body: bytes | dict[str, Any], warnings: Warnings) -> Files:
        files = read(FILES, body, warnings)
        self._check_files(files.files, "$", home="")
        return files

    def read_fetch(self, query: bytes) -> Fetch:
        """The query of `GET /v1/sessions/{id}/files`: every `path`, and the tenant."""
        given = _query(query, self._bounds.files + 1)
        if unknown := given.keys() - {"path", "tenant"}:
            raise Refusal("bad_query", f"{quote(unknown.pop())} is not one of path, tenant")
        return self._checked_fetch(Fetch(given.get("path", []), given.get("tenant", [""])[-1]), "bad_query", "path")

    def make_fetch(self, fields: dict[str, Any], warnings: Warnings) -> Fetch:
        return self._checked_fetch(read(FETCH, fields, warnings), "bad_field", "$.fetch.paths")

    def _checked_fetch(self, wanted: Fetch, code: str, field: str) -> Fetch:
        if not wanted.paths:
            raise Refusal(code, "at least one path must be given", field=field)
        try:
            bounds.check_paths(wanted.paths, self._bounds, "paths")
        except WrongField as wrong:
            raise Refusal(code, str(wrong), field=field) from None
        return wanted

    def has_items(self, body: bytes) -> bool:
        return bool(bytes(decode(_decode_outline, body).items))

    def read_verify_batch(self, body: bytes, warnings: Warnings) -> list[Verify]:
        batch, warned = _read(VERIFY_BATCH, body)
        self.check_number(len(batch.items), "items")
        if warned:
            _warn_each(VerifyBatch, body, "items", Verify, warnings)
        return batch.items

    def check_number(self, count: int, name: str) -> None:
        if count > self._max_calls:
            raise Refusal("too_many_calls", f"{count} {name}; at most {self._max_calls} fit in one request", field=f"$.{name}")

    def check_limits(self, limits: Limits, at: str) -> None:
        if limits.output_kb > self._max_output_kb:
            detail = f"{limits.output_kb} is more than {self._max_output_kb}, the limit of EXEC_MAX_OUTPUT_KB"
            raise Refusal("bad_field", detail, field=f"{at}.output_kb")

    def check(self, call: Call, at: str) -> None:
        if call.limits.output_kb > self._max_output_kb:
            self.check_limits(call.limits, f"{at}.limits")
        if call.language not in self._worker_registry.languages:
            self._check_language(call.language, f"{at}.language")
        if call.require_tier:
            self._check_tier(call.require_tier, f"{at}.require_tier")
        if call.files or call.fetch_files or call.env or call.argv or call.compile_args:
            with named(at):
                bounds.check_call(call, self._bounds)
                bounds.check_arguments(call.compile_args, self._bounds, "compile_args")
            _check_contents(call.files, at)

    def _check_files(self, files: dict[str, str], at: str, home: str) -> None:
        with named(at):
            bounds.check_files(files, self._bounds, home)
        _check_contents(files, at)

    def _check_language(self, language: str, field: str) -> None:
        if language not in (known := self._worker_registry.languages):
            raise Refusal("unknown_language", f"{quote(language)} is not one of {', '.join(known)}", field=field)

    def _check_tier(self, wanted: str, field: str) -> None:
        if not self._worker_registry.alive:
            raise Refusal("not_ready", "no worker is alive, so no tier can be promised", field=field, retry_after_s=1.0)
        best = self._worker_registry.best_tier
        if strength(best) < strength(wanted):
            raise Refusal("tier_unavailable", f"tier {wanted} is required; the best live worker has {best}", field=field)


def _check_function(judge: Judge) -> None:
    if judge.language != "python":
        raise Refusal("bad_field", "only functions of Python programs can be called", field="$.function")
    if not is_name(judge.function):
        raise Refusal("bad_field", "a function is named as `solve` or `Solution.solve`", field="$.function")


def _check_function_test(test: Test, at: str) -> None:
    for name, read in (("stdin", arguments), ("expected", load)):
        try:
            read(getattr(test, name))
        except ValueError as error:
            raise Refusal("bad_field", _short(f"must be JSON for a function: {error}"), field=f"{at}.{name}") from None


def read_selection(query: bytes, *, any_tag: bool = False) -> Selection:
    selection = read_query(query, Selection, repeated=("index",))
    if not any_tag:
        _check_names_calls(selection, "bad_query")
    return selection


def _check_names_calls(selection: Selection, code: str) -> None:
    if not selection.names_calls:
        tags = "at least one of run, step, group, rollout and request must be given"
        raise Refusal(code, "index needs request" if selection.index else tags)


def _query(query: bytes, most: int = MOST_INDEXES + 100) -> dict[str, list[str]]:
    try:
        return parse_qs(query.decode("latin-1"), keep_blank_values=True, max_num_fields=most)
    except ValueError:
        raise Refusal("bad_query", f"the query has more than {most} parameters") from None


def read_query(query: bytes, message: type[Q], repeated: Collection[str] = ()) -> Q:
    given = _query(query)
    for name, values in given.items():
        if name not in message.__struct_fields__:
            known = ", ".join(message.__struct_fields__)
            raise Refusal("bad_query", f"{quote(name)} is not one of {known}", field=_short(name))
        if len(values) > 1 and name not in repeated:
            raise Refusal("bad_query", f"{name} is given {len(values)} times", field=name)
    try:
        fields = {name: values if name in repeated else values[0] for name, values in given.items()}
        return msgspec.convert(fields, message, strict=False)
    except msgspec.ValidationError as error:
        wrong = _bad_field(str(error))
        raise Refusal("bad_query", wrong.detail, field=wrong.field.removeprefix("$.")) from None


def make_selection(fields: dict[str, Any]) -> Selection:
    """As `read_selection`, from decoded fields."""
    selection: Selection = decode(partial(msgspec.convert, type=Selection), fields)
    _check_names_calls(selection, "bad_field")
    return selection


def read(reader: Reader[Q], body: bytes | dict[str, Any], warnings: Warnings) -> Q:
    """Decode a message of one call; add its unknown fields to `warnings`."""
    message, warned = _read(reader, body)
    if warned and (found := UnknownFields().of(reader.kind, body)):
        warnings[0] = found
    return message


def _read(reader: Reader[Q], body: bytes | dict[str, Any]) -> tuple[Q, bool]:
    made: tuple[Q, bool] = decode(reader.read, body)
    return made


def _warn_each(kind: type[Struct], body: Any, name: str, item: type[Struct], warnings: Warnings) -> None:
    """Warn of unknown fields per item; those of the request itself go to its first item."""
    fields = UnknownFields()
    found = {0: fields.of(kind, body, but=name)}
    for index, part in items(members(body)[name]):
        found[index] = found.get(index, []) + fields.of(item, part)
    warnings.update((index, unknown) for index, unknown in found.items() if unknown)


def decode(decode: Callable[[B], T], body: B) -> T:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error)) from None
    except UnicodeDecodeError:
        raise Refusal("bad_json", "the body is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise Refusal("bad_json", _short(str(error))) from None
    except RecursionError:
        raise Refusal("bad_json", "the body is nested too deeply") from None


def _bad_field(message: str) -> Refusal:
    """Split msgspec's message, such as "Expected `float` > 0.0 - at `$.limits.wall_s`", into detail and path."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "$") if match else (message, "$")
    missing = _MISSING.search(what)
    return Refusal("bad_field", _short(what), field=_short(f"{path}.{missing[1]}" if missing else path))


@contextmanager
def named(at: str) -> Iterator[None]:
    """Turn a `WrongField` into a refusal with the path in the request."""
    try:
        yield
    except WrongField as wrong:
        raise Refusal("bad_field", str(wrong), field=f"{at}.{wrong.field}") from None


def check_strings(body: bytes, most: int) -> None:
    """Refuse a body with more strings than `most`, with two passes over its bytes.

    Every string has an opening quote, and a closing one that may look escaped: the count lies between the number of strings and
    twice that.
    """
    if len(body) > SMALL_BYTES and (found := body.count(b'"') - body.count(b'\\"')) > 2 * most:
        detail = f"the body has more than {found // 2} names and texts; at most {most} fit in one request"
        raise Refusal("too_many_calls", detail, field=_largest_field(body))


def _largest_field(body: bytes) -> str:
    outline = decode(_decode_outline, body)
    name = max(outline.__struct_fields__, key=lambda name: len(bytes(getattr(outline, name))))
    return f"$.{name}" if bytes(getattr(outline, name)) else "$"


def _has_at_most(raw: bytes, most: int) -> bool:
    """Whether a well-formed JSON list has at most `most` items; scans no further than that."""
    text, at, count = raw.decode(), 1, 0
    while text[at := _GAP.match(text, at).end()] != "]":  # type: ignore[union-attr]
        if (count := count + 1) > most:
            return False
        at = _scan(text, at)[1]
    return True


def _check_contents(files: dict[str, str], at: str) -> None:
    for path, content in files.items():
        try:
            binascii.a2b_base64(content, strict_mode=True)
        except ValueError as error:
            raise Refusal("bad_field", f"is not base64: {error}", field=f"{at}.files[{quote(path)}]") from None


def _short(text: str) -> str:
    return text if len(text) <= MAX_DETAIL_CHARS else text[:MAX_DETAIL_CHARS] + "…"
