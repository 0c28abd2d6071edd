"""What a caller may send: the one place where a body becomes calls, or a refusal that names the field.

Types and ranges are declared on the messages themselves (`exec_wire.messages`); here is what a type cannot say.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from exec_service.fleet import Fleet, strength
from exec_service.harnesses import arguments, is_name, load
from exec_service.refusals import Refusal
from exec_wire.judging import Judge, Test, decode_judge
from exec_wire.messages import Batch, Call, Limits, Selection, decode_batch, decode_call
from exec_wire.sessions import (
    Cell,
    Fetch,
    Files,
    Fork,
    SessionSpec,
    Tenant,
    decode_cell,
    decode_files,
    decode_fork,
    decode_session,
    decode_tenant,
)
from exec_wire.verifying import Verify, decode_verify, decode_verify_batch

OPEN_FOLDERS = ("tmp", "mnt")  # where a program may write by an absolute path
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255  # of one part of a path; Linux NAME_MAX
MAX_DETAIL_CHARS = 300

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key` in `)?(?P<path>\$.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")

B = TypeVar("B")
T = TypeVar("T")
Q = TypeVar("Q", bound=msgspec.Struct)


class _Shape(msgspec.Struct):
    items: msgspec.Raw = msgspec.Raw()


_decode_shape = msgspec.json.Decoder(_Shape).decode


class Validator:
    """Checks calls against what is installed and alive."""

    def __init__(self, fleet: Fleet, max_calls_per_request: int, max_output_kb: int) -> None:
        self._fleet = fleet
        self._max_calls = max_calls_per_request
        self._max_output_kb = max_output_kb

    def read_call(self, body: bytes) -> Call:
        return self._checked(decode(decode_call, body))

    def read_batch(self, body: bytes) -> list[Call]:
        return self._checked_batch(decode(decode_batch, body))

    def make_call(self, fields: dict[str, Any]) -> Call:
        """As `read_call`, of what another decoder has read."""
        return self._checked(decode(_make_call, fields))

    def make_batch(self, fields: dict[str, Any]) -> list[Call]:
        return self._checked_batch(decode(_make_batch, fields))

    def _checked(self, call: Call) -> Call:
        self.check(call, "$")
        return call

    def _checked_batch(self, batch: Batch) -> list[Call]:
        self.check_number(len(batch.calls), "calls")
        for index, call in enumerate(batch.calls):
            self.check(call, f"$.calls[{index}]")
        return batch.calls

    def read_judge(self, body: bytes) -> Judge:
        judge = decode(decode_judge, body)
        self.check_number(len(judge.tests), "tests")
        self._check_language(judge.language, "$.language")
        if judge.require_tier:
            self._check_tier(judge.require_tier, "$.require_tier")
        if judge.checker.kind == "program":
            self._check_language(judge.checker.language, "$.checker.language")
            if not judge.checker.code:
                raise Refusal("bad_field", "a checker of the kind program needs its code", field="$.checker.code")
        for index, argument in enumerate(judge.compile_args):
            _no_nul(argument, "an argument", f"$.compile_args[{index}]")
        if judge.function:
            _check_function(judge)
        self.check_limits(judge.limits, "$.limits")
        for index, test in enumerate(judge.tests):
            if test.limits is not None:
                self.check_limits(test.limits, f"$.tests[{index}].limits")
            _check_test(test, f"$.tests[{index}]", function=bool(judge.function))
        return judge

    def make(self, kind: type[Q], fields: dict[str, Any]) -> Q:
        """As what is read, of what another decoder has read."""
        made: Q = decode(partial(msgspec.convert, type=kind), fields)
        return made

    def make_session(self, fields: dict[str, Any]) -> SessionSpec:
        if "limits" in fields:  # what is not set has the default of a session, not that of a call
            fields["limits"] = msgspec.to_builtins(SessionSpec().limits) | fields["limits"]
        return self._checked_session(self.make(SessionSpec, fields))

    def make_cell(self, fields: dict[str, Any]) -> Cell:
        return self.make(Cell, fields)

    def make_files(self, fields: dict[str, Any]) -> Files:
        files = self.make(Files, fields)
        _check_files(files.files, "$.files")
        return files

    def make_fetch(self, fields: dict[str, Any]) -> Fetch:
        return check_fetch(self.make(Fetch, fields), "bad_field", "$.fetch.paths")

    def read_session(self, body: bytes) -> SessionSpec:
        return self._checked_session(decode(decode_session, body))

    def _checked_session(self, spec: SessionSpec) -> SessionSpec:
        if spec.profile and self._fleet.alive and spec.profile not in (known := self._fleet.profiles):
            raise Refusal("bad_field", f"{_quote(spec.profile)} is not one of {', '.join(known)}", field="$.profile")
        self.check_limits(spec.limits, "$.limits")
        _check_files(spec.files, "$.files")
        for name, value in spec.env.items():
            _check_variable(name, value, f"$.env[{_quote(name)}]")
        return spec

    def read_cell(self, body: bytes) -> Cell:
        return decode(decode_cell, body)

    def read_fork(self, body: bytes) -> Fork:
        return decode(decode_fork, body or b"{}")

    def read_tenant(self, body: bytes) -> Tenant:
        return decode(decode_tenant, body or b"{}")

    def read_files(self, body: bytes) -> Files:
        files = decode(decode_files, body)
        _check_files(files.files, "$.files")
        return files

    def has_items(self, body: bytes) -> bool:
        return bool(bytes(decode(_decode_shape, body).items))

    def read_verify(self, body: bytes) -> Verify:
        return decode(decode_verify, body)

    def read_verify_batch(self, body: bytes) -> list[Verify]:
        items = decode(decode_verify_batch, body).items
        self.check_number(len(items), "items")
        return items

    def check_number(self, count: int, name: str) -> None:
        if count > self._max_calls:
            raise Refusal("too_many_calls", f"{count} {name}; at most {self._max_calls} fit in one request", field=f"$.{name}")

    def check_limits(self, limits: Limits, at: str) -> None:
        if limits.output_kb > self._max_output_kb:
            words = f"{limits.output_kb} is more than {self._max_output_kb}, the most that EXEC_MAX_OUTPUT_KB allows here"
            raise Refusal("bad_field", words, field=f"{at}.output_kb")

    def check(self, call: Call, at: str) -> None:
        self.check_limits(call.limits, f"{at}.limits")
        self._check_language(call.language, f"{at}.language")
        if call.require_tier:
            self._check_tier(call.require_tier, f"{at}.require_tier")
        if call.files:
            _check_files(call.files, f"{at}.files")
        for index, path in enumerate(call.fetch_files):
            _parts(path, f"{at}.fetch_files[{index}]")
        for name, value in call.env.items():
            _check_variable(name, value, f"{at}.env[{_quote(name)}]")
        for index, argument in enumerate(call.argv):
            _no_nul(argument, "an argument", f"{at}.argv[{index}]")
        for index, argument in enumerate(call.compile_args):
            _no_nul(argument, "an argument", f"{at}.compile_args[{index}]")

    def _check_language(self, language: str, field: str) -> None:
        if language not in (known := self._fleet.languages):
            raise Refusal("unknown_language", f"{_quote(language)} is not one of {', '.join(known)}", field=field)

    def _check_tier(self, wanted: str, field: str) -> None:
        if not self._fleet.alive:
            raise Refusal("not_ready", "no worker is alive, so no tier can be promised", field=field, retry_after_s=1.0)
        best = self._fleet.best_tier
        if strength(best) < strength(wanted):
            raise Refusal("tier_unavailable", f"tier {wanted} is required; the best live worker has {best}", field=field)


def _check_function(judge: Judge) -> None:
    if judge.language != "python":
        raise Refusal("bad_field", "only functions of Python programs can be called", field="$.function")
    if not is_name(judge.function):
        raise Refusal("bad_field", "a function is named as `solve` or `Solution.solve`", field="$.function")


def _check_test(test: Test, at: str, *, function: bool) -> None:
    for index, argument in enumerate(test.argv):
        _no_nul(argument, "an argument", f"{at}.argv[{index}]")
    if not function:
        return
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


def read_query(query: bytes, message: type[Q], repeated: Collection[str] = ()) -> Q:
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    for name, values in given.items():
        if name not in message.__struct_fields__:
            known = ", ".join(message.__struct_fields__)
            raise Refusal("bad_query", f"{_quote(name)} is not one of {known}", field=_short(name))
        if len(values) > 1 and name not in repeated:
            raise Refusal("bad_query", f"{name} is given {len(values)} times", field=name)
    try:
        fields = {name: values if name in repeated else values[0] for name, values in given.items()}
        return msgspec.convert(fields, message, strict=False)
    except msgspec.ValidationError as error:
        wrong = _bad_field(str(error))
        raise Refusal("bad_query", wrong.detail, field=wrong.field.removeprefix("$.")) from None


def read_fetch(query: bytes) -> Fetch:
    """Of `GET /v1/sessions/{id}/files`: every `path`, and the tenant."""
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    if unknown := given.keys() - {"path", "tenant"}:
        raise Refusal("bad_query", f"{_quote(unknown.pop())} is not one of path, tenant")
    return check_fetch(Fetch(given.get("path", []), given.get("tenant", [""])[-1]), "bad_query", "path")


def check_fetch(wanted: Fetch, code: str, field: str) -> Fetch:
    if not wanted.paths:
        raise Refusal(code, "at least one path must be given", field=field)
    for path in wanted.paths:
        try:
            _parts(path, field)
        except Refusal as refusal:
            raise Refusal(code, refusal.detail, field=field) from None
    return wanted


def make_selection(fields: dict[str, Any]) -> Selection:
    """As `read_selection`, of what another decoder has read."""
    selection: Selection = decode(_make_selection, fields)
    _check_names_calls(selection, "bad_field")
    return selection


_make_call = partial(msgspec.convert, type=Call)
_make_batch = partial(msgspec.convert, type=Batch)
_make_selection = partial(msgspec.convert, type=Selection)


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
    """msgspec says where in the message: "Expected `float` > 0.0 - at `$.limits.wall_s`"."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "$") if match else (message, "$")
    missing = _MISSING.search(what)
    return Refusal("bad_field", _short(what), field=_short(f"{path}.{missing[1]}" if missing else path))


def _check_files(files: dict[str, str], at: str) -> None:
    seen: dict[tuple[str, ...], str] = {}
    for path, content in files.items():
        field = f"{at}[{_quote(path)}]"
        parts = _parts(path, field)
        if parts in seen:
            raise Refusal("bad_field", f"names the same file as {_quote(seen[parts])}", field=field)
        seen[parts] = path
        try:
            binascii.a2b_base64(content, strict_mode=True)
        except ValueError as error:
            raise Refusal("bad_field", f"is not base64: {error}", field=field) from None
    for parts, path in seen.items():
        _no_file_above(parts, path, seen, at)


def _no_file_above(parts: tuple[str, ...], path: str, files: Collection[tuple[str, ...]], at: str) -> None:
    if any(parts[:length] in files for length in range(1, len(parts))):
        raise Refusal("bad_field", "lies under a path that is itself a file", field=f"{at}[{_quote(path)}]")


def _parts(path: str, field: str) -> tuple[str, ...]:
    """The parts of a path that a program may use: relative, or absolute under one of the open folders."""
    _no_nul(path, "a path", field)
    parts = PurePosixPath(path).parts
    names = parts[2:] if path.startswith("/") else parts
    if not names or path.endswith("/"):
        raise Refusal("bad_field", "a path must name a file", field=field)
    if path.startswith("/") and (parts[0] != "/" or parts[1] not in OPEN_FOLDERS):
        allowed = " or ".join(f"/{folder}" for folder in OPEN_FOLDERS)
        raise Refusal("bad_field", f"an absolute path must be under {allowed}", field=field)
    if ".." in parts:
        raise Refusal("bad_field", "a path must not contain '..'", field=field)
    if len(path.encode()) > MAX_PATH_BYTES or any(len(name.encode()) > MAX_NAME_BYTES for name in names):
        raise Refusal("bad_field", "a path is too long", field=field)
    return parts


def _check_variable(name: str, value: str, field: str) -> None:
    if not name or "=" in name:
        raise Refusal("bad_field", "the name of a variable must not be empty or contain '='", field=field)
    _no_nul(name, "the name of a variable", field)
    _no_nul(value, "the value of a variable", field)


def _no_nul(text: str, what: str, field: str) -> None:
    if "\0" in text:
        raise Refusal("bad_field", f"{what} must not contain NUL", field=field)


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")


def _short(text: str) -> str:
    return text if len(text) <= MAX_DETAIL_CHARS else text[:MAX_DETAIL_CHARS] + "…"
