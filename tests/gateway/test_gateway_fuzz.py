"""Anything in every field of every route, method and message of the queue: no 5xx, no stall, nothing left behind.

A few examples of each here; `make fuzz` makes up more (EXEC_FUZZ says how many) and reads the OpenAPI document too.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import grpc
import httpx
import msgspec
import pytest
from gateway_harness import running
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from exec_service.compat import code_judge, nemo_skills, piston, sandbox_fusion
from exec_service.dispatch.dispatch import read_result
from exec_service.rpc.session_methods import SESSION_METHODS
from exec_wire import Result, proto
from exec_wire.messages import judging
from exec_wire.messages.jobs import JobItem
from exec_wire.messages.sessions import Refused, SessionSpec, pack_sessions
from exec_wire.queue.protocol import Answer, Job, WorkerInfo
from exec_wire.queue.redis import RedisQueue
from exec_wire.queue.redis_entries import named_fields, read_envelope

EXAMPLES = int(os.environ.get("EXEC_FUZZ", "8"))
CPU_STALL_S = 1.0
bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="EXEC_FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate] if "EXEC_FUZZ" not in os.environ else list(Phase),
)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=6,
)


class Fuzzed:
    """A service in a thread of its own, and the most CPU time that its event loop has spent without a pause."""

    def __init__(self) -> None:
        self._up, self._down = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.longest_s = 0.0

    def __enter__(self) -> Fuzzed:
        self._thread.start()
        assert self._up.wait(60)
        self.http = httpx.Client(base_url=self.service.url, timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._down.set()
        self._thread.join(60)

    async def _serve(self) -> None:
        jobs = os.environ["FUZZ_JOBS"]
        async with running(grpc=True, jobs_dir=jobs, max_body_bytes=1 << 20) as self.service:
            answering = asyncio.create_task(self._refuse_sessions())
            self._up.set()
            while not self._down.is_set():
                began_s = time.thread_time()
                await asyncio.sleep(0.01)
                self.longest_s = max(self.longest_s, time.thread_time() - began_s)
            answering.cancel()

    async def _refuse_sessions(self) -> None:
        """The worker has none; else a request would wait for it."""
        end = self.service.worker.end
        while True:
            told = pack_sessions(Refused("no_such_session"))
            await end.answer([Answer(job.id, told) for job in await end.take_directed()])

    def is_clean(self) -> bool:
        admission = self.service.gateway.dispatch.admission
        return (admission.calls, admission.bytes, admission.arriving) == (0, 0, 0)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    os.environ["FUZZ_JOBS"] = str(tmp_path_factory.mktemp("jobs"))
    with Fuzzed() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(fuzzed: Fuzzed) -> Iterator[None]:
    """After every test: the loop was not held up, nothing stays charged, and programs are run."""
    fuzzed.longest_s = 0.0
    yield
    give_up = time.monotonic() + 30
    while not fuzzed.is_clean():
        assert time.monotonic() < give_up, "calls or bytes stay charged"
        time.sleep(0.02)
    assert fuzzed.longest_s < CPU_STALL_S
    assert fuzzed.http.get("/healthz").status_code == 200
    assert fuzzed.http.post("/v1/run", json={"code": "say canary"}).json()["stdout"] == "canary"


def run(strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    bounded(given(strategy)(check))()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_route_of_the_openapi_document_fails(fuzzed: Fuzzed, mode: str) -> None:
    """What fits the document, and what does not. Most of the time goes into making it up."""
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{fuzzed.service.url}/openapi.json")

    def check(case: Any) -> None:
        answer = case.call(timeout=60)
        assert answer.status_code < 500, f"{case.as_curl_command()}\n{answer.content[:500]!r}"

    for found in schema.get_all_operations():
        operation = found.ok()
        if (operation.method, operation.path) == ("post", "/v1/jobs"):  # schemathesis does not speak NDJSON; see below
            continue
        with suppress(Unsatisfiable):  # there is nothing that could be wrong
            run(operation.as_strategy(schemathesis.GenerationMode(mode)), check)


@pytest.mark.parametrize("verb", ["GET", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/v1/calls", "/v1/sessions", "/v1/sessions/x", "/v1/sessions/x/files", "/v1/stats", "/v1/jobs/x"]
)
def test_no_query_makes_a_route_fail(fuzzed: Fuzzed, verb: str, path: str) -> None:
    names = st.sampled_from(["run", "step", "group", "tenant", "request", "index", "path", "name", "follow", "kind", "x"])

    def check(query: dict[str, str]) -> None:
        answer = fuzzed.http.request(verb, path, params=query)
        assert answer.status_code < 500, f"{verb} {path} {query!r} {answer.text[:500]}"

    run(st.dictionaries(names, text | st.integers().map(str), max_size=4), check)


def like(kind: Any) -> st.SearchStrategy[Any]:
    """What fits the type by its shape, if not by its bounds; now and then something else."""
    return st.one_of(_fitting(kind), _fitting(kind), _fitting(kind), json_values)


def _fitting(kind: Any) -> st.SearchStrategy[Any]:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _fitting(inside[0])
    if origin in (UnionType, Union):
        return st.one_of(*(_fitting(one) for one in inside))
    if origin is Literal:
        return st.sampled_from(inside)
    if origin in (list, tuple):
        return st.lists(st.deferred(lambda: like(inside[0])), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(max_size=8), st.deferred(lambda: like(inside[1])), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {name: like(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
        return st.fixed_dictionaries({}, optional=fields)
    simple = {str: st.text(max_size=20), bool: st.booleans(), int: st.integers(), float: st.floats(), bytes: st.binary()}
    return simple.get(kind, json_values)


BODIES: dict[str, Any] = {
    "/v1/jobs": JobItem,
    "/v1/judge": judging.Judge,
    "/v1/sessions": SessionSpec,
    "/run": code_judge.Submission,
    "/judge/batch": code_judge.BatchSubmission,
    "/run_code": sandbox_fusion.RunCode,
    "/run_jupyter": sandbox_fusion.RunJupyter,
    "/submit": sandbox_fusion.Submit,
    "/execute": nemo_skills.Execute,
    "/api/v2/execute": piston.Execute,
    "/v1/verify": judging.VerifyBatch,
}


@pytest.mark.parametrize("path", BODIES)
def test_no_field_of_a_body_makes_a_route_fail(fuzzed: Fuzzed, path: str) -> None:
    def check(body: Any) -> None:
        sent = json.dumps(body).encode("utf-8", "surrogatepass")
        kind = "application/x-ndjson" if path == "/v1/jobs" else "application/json"
        answer = fuzzed.http.post(path, content=sent, headers={"content-type": kind})
        assert answer.status_code < 500, f"{path} {sent!r} {answer.text[:500]}"

    run(like(BODIES[path]), check)


NO_MESSAGES = [b"[" * 500_000, b'{"a":' * 100_000, b'"\xff\xfe', b'{"code": "\\ud800"}', b"1e999", b"\x00", b""]


@pytest.mark.parametrize("path", ["/v1/run", "/v1/batch", "/v1/judge", "/v1/sessions", "/run_code", "/mcp", "/v1/jobs"])
def test_no_route_fails_for_bytes_that_are_no_message(fuzzed: Fuzzed, path: str) -> None:
    kind = "application/x-ndjson" if path == "/v1/jobs" else "application/json"
    headers = {"content-type": kind, "accept": "application/json, text/event-stream"}
    for body in NO_MESSAGES:
        answer = fuzzed.http.post(path, content=body, headers=headers)
        assert 400 <= answer.status_code < 500, (body[:20], answer.text)


# -- gRPC -----------------------------------------------------------------------------------------------------------------


def fields(name: str, depth: int = 3) -> st.SearchStrategy[dict[str, Any]]:
    """Of a message of exec.proto, each set or not."""
    made = {}
    for field in proto.DECLARED[name].field:
        kind = field.type_name.rpartition(".")[2]
        one = _scalar(field.type)
        if kind in proto.DECLARED:
            if not depth:
                continue
            one = fields(kind, depth - 1)
        entry = next((nested for nested in proto.DECLARED[name].nested_type if nested.name == kind), None)
        if entry is not None:
            made[field.name] = st.dictionaries(st.text(max_size=8), _scalar(entry.field[1].type), max_size=3)
        else:
            made[field.name] = st.lists(one, max_size=3) if field.label == field.LABEL_REPEATED else one
    return st.fixed_dictionaries({}, optional=made)


def _scalar(kind: int) -> st.SearchStrategy[Any]:
    of = proto._FieldProto
    ints = {of.TYPE_INT32: st.integers(-(2**31), 2**31 - 1), of.TYPE_UINT32: st.integers(0, 2**32 - 1)}
    ints |= {of.TYPE_UINT64: st.integers(0, 2**64 - 1), of.TYPE_INT64: st.integers(-(2**63), 2**63 - 1)}
    others = {of.TYPE_DOUBLE: st.floats(), of.TYPE_BOOL: st.booleans(), of.TYPE_BYTES: st.binary(max_size=20)}
    return (ints | others).get(kind, text)


METHODS = {"Run": "Call", "RunBatch": "CallBatch", "Stream": "CallBatch", "Cancel": "Selection", "Info": "InfoRequest"}
METHODS |= {name: method.request._class.DESCRIPTOR.name for name, method in SESSION_METHODS.items()}


@pytest.mark.parametrize("method", METHODS)
def test_no_grpc_method_fails(fuzzed: Fuzzed, method: str) -> None:
    message = proto.Message(METHODS[method])

    def check(asked: Any) -> None:
        data = asked if isinstance(asked, bytes) else message.write(**asked)
        try:
            list(channel.stream_stream(f"/{proto.SERVICE}/{method}")(iter([data]), timeout=60))
        except grpc.RpcError as error:
            assert error.code().name not in ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"), (data, error)  # type: ignore[attr-defined]

    with grpc.insecure_channel(fuzzed.service.grpc_target) as channel:
        run(fields(METHODS[method]) | st.binary(max_size=100), check)


# -- the queue ------------------------------------------------------------------------------------------------------------

packed = st.binary(max_size=200) | json_values.map(lambda value: _pack(value))  # some integers do not fit


def test_no_answer_of_a_worker_breaks_a_gateway() -> None:
    def check(payload: bytes) -> None:
        assert read_result(Answer("id", payload)).status

    run(packed | like(Result).map(_pack) | st.just(b"\x91" * 100_000), check)


def test_no_entry_of_the_queue_breaks_who_reads_it() -> None:
    ends = RedisQueue("redis://127.0.0.1:1")
    gateway, worker = ends.gateway("g"), ends.worker("w")

    def check(named: dict[bytes, bytes]) -> None:
        words = [part for pair in named.items() for part in pair]
        gateway._open_answers(words)
        gateway._workers.read([named.get(b"a", b"")], gateway.unreadable)
        envelope = read_envelope(named_fields(words))
        if envelope is not None:
            worker._open_job(envelope, named_fields(words))

    texts = st.sampled_from([b"1", b"2", b"-1", b"x", b"\xff", b"g", b"9" * 5000])
    names = {name: texts | packed | like(kind).map(_pack) for name, kind in ((b"v", int), (b"id", str), (b"to", str))}
    names |= {b"a": packed | like(list[Answer]).map(_pack) | like(WorkerInfo).map(_pack), b"j": packed | like(Job).map(_pack)}
    names[b"j"] |= st.just(b"\x91" * 100_000)
    run(st.fixed_dictionaries({}, optional=names), check)


def _pack(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return b""
