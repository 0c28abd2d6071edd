"""The gRPC door: the same calls, results and refusals as over HTTP, as gRPC says them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest
from gateway_harness import Service, running, soon, until
from grpc_harness import Caller, all_results, caller, calls, drained, refused, results
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from exec_service.api.listening import BindRefused, PortTaken, address_for_grpc
from exec_service.app import Gateway, serve
from exec_service.config import GatewayConfig
from exec_service.rpc.server import status_code
from exec_service.tenants.keys import add_key, remove_key
from exec_wire import proto
from exec_wire.messages.calls import Call, Status
from exec_wire.problems import PROBLEMS
from exec_wire.queue.memory import MemoryQueue

ONLY_HTTP = {
    "bad_http",
    "headers_too_large",
    "bad_json",
    "bad_query",
    "not_found",
    "method_not_allowed",
    "wrong_content_type",
    "foreign_host",
    "foreign_origin",
}


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running(grpc=True) as service:
        yield service


@pytest.fixture
async def one(service: Service) -> AsyncIterator[Caller]:
    async with caller(service.grpc_target) as made:
        yield made


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Service]:
    async with running(grpc=True, slots=16) as service:
        yield service


@pytest.fixture(scope="module")
async def to_shared(shared: Service) -> AsyncIterator[Caller]:
    async with caller(shared.grpc_target) as made:
        yield made


# -- results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", get_args(Status))
async def test_each_status_is_the_same_result_at_both_doors(shared: Service, to_shared: Caller, status: str) -> None:
    mine = await to_shared.run(f"end {status}", id="label")
    theirs = (await shared.run(f"end {status}", id="label")).json()
    assert (mine.status, mine.blame, mine.retryable, mine.id) == tuple(
        theirs[name] for name in ("status", "blame", "retryable", "id")
    )
    assert mine.status == status and mine.worker == "w1" and mine.timings.run_ms == 2.0


async def test_every_field_of_a_call_arrives_as_over_http(shared: Service, to_shared: Caller) -> None:
    fields: dict[str, Any] = {
        "stdin": "in", "fetch_files": ["g"], "env": {"A": "b"}, "argv": ["1"], "compile_args": ["-O1"], "tenant": "t",
        "limits": {"wall_s": 1.5, "cpu_s": 2, "memory_mb": 64, "output_kb": 2, "processes": 3, "file_mb": 4},
        "priority": "bulk", "require_tier": "A", "echo_value": True, "id": "x", "tags": {"run": "r", "step": 0},
    }  # fmt: skip
    await to_shared.run("say a", files={"f": b"\0\1"}, **fields)
    await shared.run("say a", files={"f": "AAE="}, **fields)
    mine, theirs = shared.worker.calls[-2:]
    assert mine == theirs
    assert mine.files == {"f": "AAE="} and mine.limits.wall_s == 1.5


async def test_what_is_not_set_has_the_usual_value(shared: Service, to_shared: Caller) -> None:
    await to_shared.run("say a", limits={"wall_s": 3})
    assert shared.worker.calls[-1].limits == Call("", limits=type(shared.worker.calls[-1].limits)(wall_s=3)).limits
    await to_shared.run("")  # an empty program is a program
    assert shared.worker.calls[-1] == Call("")


async def test_a_batch_is_answered_as_it_lands(service: Service, one: Caller) -> None:
    answer = one.batch({"code": "hold a", "id": "slow"}, {"code": "say b", "id": "fast"})
    [first] = results(await answer.read())
    assert (first.index, first.id, first.stdout) == (1, "fast", "b")
    service.worker.let_go.set()
    [second] = await all_results(answer)
    assert (second.index, second.id) == (0, "slow")
    assert await drained(answer) is grpc.StatusCode.OK


async def test_an_empty_batch_is_no_error(to_shared: Caller) -> None:
    assert await all_results(to_shared.batch()) == []


async def test_a_large_output_arrives_whole_and_much_output_in_several_messages(shared: Service, to_shared: Caller) -> None:
    text = "é" * 1_000_000
    assert (await to_shared.run("echo", stdin=text)).stdout == text
    answer = to_shared.batch(*({"code": "echo", "stdin": f"{n}" + "x" * 200_000} for n in range(20)))
    sizes = [len(message) async for message in answer]
    assert max(sizes) < 1 << 20 and sum(sizes) > 20 * 200_000


async def test_the_request_id_and_trace_of_the_caller_come_back(to_shared: Caller) -> None:
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    call = to_shared.run_(proto.CALL.write(code="say x"), metadata=(("x-request-id", "mine"), ("traceparent", trace)))
    fields = proto.RESULT.read(await call)
    assert (fields["request_id"], fields["traceparent"]) == ("mine", trace)
    assert dict(await call.trailing_metadata())["x-request-id"] == "mine"


# -- the stream -----------------------------------------------------------------------------------------------------------


async def test_a_streams_results_are_counted_over_all_its_batches(service: Service, one: Caller) -> None:
    stream = one.stream()
    await stream.write(calls("say a", "hold b"))
    assert [(r.index, r.stdout) for r in results(await stream.read())] == [(0, "a")]
    await stream.write(calls("say c"))
    assert [(r.index, r.stdout) for r in results(await stream.read())] == [(2, "c")]
    service.worker.let_go.set()
    assert [(r.index, r.stdout) for r in results(await stream.read())] == [(1, "b")]
    await stream.done_writing()
    assert await drained(stream) is grpc.StatusCode.OK


async def test_a_message_carries_what_has_landed_since_the_last_one(service: Service) -> None:
    async with running(grpc=True, slots=500) as wide, caller(wide.grpc_target) as one:
        stream = one.stream()
        await stream.write(calls(*["hold x"] * 500))
        await until(lambda: len(wide.worker.calls) == 500)
        wide.worker.let_go.set()
        await stream.done_writing()
        messages = [results(message) async for message in stream]
    assert sorted(r.index for message in messages for r in message) == list(range(500))
    assert len(messages) < 100


async def test_a_refused_batch_of_a_stream_harms_no_other(service: Service, one: Caller) -> None:
    stream = one.stream()
    await stream.write(calls("hold a"))
    await stream.write(proto.CALL_BATCH.write(calls=[{"code": "say b"}, {"code": "say c", "limits": {"wall_s": -1}}]))
    [told] = proto.RESULT_BATCH.read(await stream.read())["refused"]
    assert (told["index"], told["calls"]) == (1, 2)
    assert (told["problem"]["code"], told["problem"]["field"]) == ("bad_field", "$.calls[1].limits.wall_s")
    await stream.write(calls("say d"))
    assert [(r.index, r.stdout) for r in results(await stream.read())] == [(3, "d")]
    service.worker.let_go.set()
    await stream.done_writing()
    assert [(r.index, r.stdout) for r in await all_results(stream)] == [(0, "a")]
    assert service.worker.codes == ["hold a", "say d"]


async def test_bytes_that_are_no_message_end_a_stream_after_what_was_accepted(service: Service, one: Caller) -> None:
    stream = one.stream()
    await stream.write(calls("hold a"))
    await until(lambda: len(service.worker.calls) == 1)
    await stream.write(b"\xff\xff\xff")
    await asyncio.sleep(0.05)
    service.worker.let_go.set()
    assert [r.stdout for r in results(await stream.read())] == ["a"]
    with refused("INVALID_ARGUMENT", "bad_message"):
        await stream.read()


# -- giving up ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Run", "RunBatch", "Stream"])
async def test_a_cancelled_request_kills_its_programs(service: Service, one: Caller, method: str) -> None:
    if method == "Run":
        call = one.run_(proto.CALL.write(code="hold"))
    elif method == "RunBatch":
        call = one.batch({"code": "hold"})
    else:
        call = one.stream()
        await call.write(calls("hold"))
    await until(lambda: len(service.worker.calls) == 1)
    call.cancel()
    await until(lambda: len(service.worker.cancelled) == 1)
    await until(lambda: service.gateway.dispatch.admission.calls == 0)
    assert await service.metric("exec_calls_total", status="cancelled", blame="client") == 1
    await until(lambda: service.gateway.metrics.registry.get_sample_value(
        "exec_grpc_requests_total", {"method": method, "code": "CANCELLED"}) == 1)  # fmt: skip


async def test_a_caller_that_vanishes_has_its_programs_killed(service: Service) -> None:
    async with caller(service.grpc_target) as gone:
        stream = gone.stream()
        await stream.write(calls("hold", "hold"))
        await until(lambda: len(service.worker.calls) == 2)
    await until(lambda: len(service.worker.cancelled) == 2)
    await until(lambda: service.gateway.dispatch.admission.calls == 0)


async def test_cancellation_by_tags(service: Service, one: Caller) -> None:
    held = soon(one.run("hold", tags={"run": "r", "step": 3}, tenant="t"))
    await until(lambda: len(service.worker.calls) == 1)
    assert await one.cancel(run="r", step=4, tenant="t") == 0
    assert await one.cancel(run="r") == 0, "another tenant's"
    assert await one.cancel(run="r", step=3, tenant="t") == 1
    assert (await held).status == "cancelled"
    with refused("INVALID_ARGUMENT", "bad_field"):
        await one.cancel(tenant="t")
    with refused("INVALID_ARGUMENT", "bad_field") as told:
        await one.cancel(run="")
    assert told.problem.field == "$.run"


# -- deadlines ------------------------------------------------------------------------------------------------------------


async def test_the_requests_deadline_is_its_calls_deadline(service: Service, one: Caller) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await one.run("hold", timeout=2)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < service.worker.jobs[0].remaining_ms <= 2000
    await until(lambda: len(service.worker.cancelled) == 1)


async def test_a_calls_own_shorter_deadline_holds(one: Caller, service: Service) -> None:
    held = [soon(one.run("hold")) for _ in range(5)]  # one more than what is released: 4 slots, a factor of 1.25
    await until(lambda: len(service.worker.calls) == 4)
    late = await one.run("say x", deadline_s=0.2)
    assert (late.status, late.blame, late.retryable) == ("expired", "infra", True)
    service.worker.let_go.set()
    await asyncio.gather(*held)


# -- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "code", "field"),
    [
        ({}, "INVALID_ARGUMENT", "bad_field", "$.code"),
        ({"code": "x", "limits": {"wall_s": 0}}, "INVALID_ARGUMENT", "bad_field", "$.limits.wall_s"),
        ({"code": "x", "limits": {"memory_mb": 1}}, "INVALID_ARGUMENT", "bad_field", "$.limits.memory_mb"),
        ({"code": "x", "deadline_s": 9999}, "INVALID_ARGUMENT", "bad_field", "$.deadline_s"),
        ({"code": "x", "priority": "urgent"}, "INVALID_ARGUMENT", "bad_field", "$.priority"),
        ({"code": "x", "files": {"../x": b""}}, "INVALID_ARGUMENT", "bad_field", "$.files['../x']"),
        ({"code": "x", "language": "cobol"}, "INVALID_ARGUMENT", "unknown_language", "$.language"),
        ({"code": "x", "language": ""}, "INVALID_ARGUMENT", "unknown_language", "$.language"),
        ({"code": "x", "require_tier": "S"}, "FAILED_PRECONDITION", "tier_unavailable", "$.require_tier"),
    ],
)
async def test_bad_input_names_the_field(to_shared: Caller, fields: dict[str, Any], status: str, code: str, field: str) -> None:
    with refused(status, code) as told:
        await to_shared.run_(proto.CALL.write(**fields))
    assert told.problem.field == field
    good = {"code": "say x"}
    with refused(status, code) as told:
        await all_results(to_shared.batch(good, fields))
    assert told.problem.field == field.replace("$", "$.calls[1]", 1)


async def test_bytes_that_are_no_message_are_refused(to_shared: Caller) -> None:
    for method in (to_shared.run_, to_shared.cancel_):
        with refused("INVALID_ARGUMENT", "bad_message"):
            await method(b"\xff\xff\xff")
    with refused("INVALID_ARGUMENT", "bad_message"):
        await all_results(to_shared.run_batch_(b"\x0a\x04\x0a\x02\xff\xff"))  # not UTF-8


def test_every_refusal_has_a_status() -> None:
    for code in set(PROBLEMS) - ONLY_HTTP:
        assert isinstance(status_code(code), grpc.StatusCode)


async def test_idempotency_is_shared_with_the_other_door(service: Service, one: Caller) -> None:
    assert (await one.run("say a", idempotency_key="k")).stdout == "a"
    assert (await service.run("say a", idempotency_key="k")).json()["stdout"] == "a"
    assert len(service.worker.calls) == 1
    with refused("ALREADY_EXISTS", "idempotency_conflict") as told:
        await all_results(one.batch({"code": "say c"}, {"code": "say b", "idempotency_key": "k"}))
    assert told.problem.field == "$.calls[1].idempotency_key"


async def test_overload_says_when_to_come_again_and_spares_what_is_inside() -> None:
    limits = {"max_calls": 2, "max_calls_per_request": 2}
    async with running(grpc=True, **limits) as full, caller(full.grpc_target) as one:  # type: ignore[arg-type]
        held = [soon(one.run("hold")) for _ in range(2)]
        await until(lambda: len(full.worker.calls) == 2)
        with refused("RESOURCE_EXHAUSTED", "overloaded") as told:
            await one.run("say x")
        assert told.problem.retry_after_s and told.problem.status == 429
        stream = one.stream()
        await stream.write(calls("say x"))
        [refusal] = proto.RESULT_BATCH.read(await stream.read())["refused"]
        assert refusal["problem"]["code"] == "overloaded" and refusal["problem"]["retry_after_s"] >= 1
        full.worker.let_go.set()
        await asyncio.gather(*held)
        await stream.write(calls("say y"))
        assert [(r.index, r.stdout) for r in results(await stream.read())] == [(1, "y")]
        with refused("INVALID_ARGUMENT", "too_many_calls") as told:
            await all_results(one.batch(*[{"code": "say x"}] * 3))
        stream.cancel()


async def test_a_message_beyond_the_limit_is_refused_by_grpc_itself() -> None:
    async with running(grpc=True, max_body_bytes=1 << 20) as small, caller(small.grpc_target) as one:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await one.run("say " + "x" * (2 << 20))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await one.run("say x")).stdout == "x"


async def test_an_error_of_ours_is_internal_and_tells_nothing(
    shared: Service, to_shared: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(shared.gateway.dispatch, "accept", broken)
    with refused("INTERNAL", "internal") as told:
        await to_shared.run("say x")
    assert "secret" not in str(told.problem) and "a secret" in caplog.text


async def test_a_client_that_reads_nothing_is_given_up() -> None:
    async with running(grpc=True, slots=16, write_stall_s=0.5) as service, caller(service.grpc_target) as deaf:
        # The window of its connection fills up, then the write stalls.
        answer = deaf.batch(*[{"code": "echo", "stdin": "x" * 1_000_000}] * 40)
        await until(lambda: len(service.worker.calls) == 40)
        assert service.gateway.dispatch.admission.calls > 0
        await until(lambda: service.gateway.dispatch.admission.calls == 0)
        answer.cancel()


# -- bursts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow), 50])
async def test_no_call_of_a_burst_is_dropped(channels: int) -> None:
    async with running(grpc=True, slots=64, body_s=300.0) as service:  # 5,000 messages are read in turns
        callers = [Caller(service.grpc_target) for _ in range(channels)]
        got = await asyncio.gather(*(callers[n % channels].run(f"say {n}", timeout=300) for n in range(5000)))
        assert [int(result.stdout) for result in got] == list(range(5000))
        await asyncio.gather(*(made.channel.close() for made in callers))


async def test_a_burst_over_one_stream_is_answered_once_each() -> None:
    async with running(grpc=True, slots=64) as service, caller(service.grpc_target) as one:
        stream = one.stream(timeout=60)

        async def send() -> None:
            for start in range(0, 5000, 100):
                await stream.write(calls(*(f"say {n}" for n in range(start, start + 100))))
            await stream.done_writing()

        sending = soon(send())
        got = await all_results(stream)
        await sending
    assert sorted((result.index, int(result.stdout)) for result in got) == [(n, n) for n in range(5000)]


# -- health, reflection, info ---------------------------------------------------------------------------------------------


async def test_health_follows_readiness(service: Service, one: Caller) -> None:
    health = health_pb2_grpc.HealthStub(one.channel)
    for name in ("", proto.SERVICE):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == 1
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    service.gateway.dispatch.not_ready_because = "no sandbox"
    assert (await asyncio.wait_for(watch.read(), 30)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with refused("UNAVAILABLE", "not_ready") as told:
        await one.run("say x")
    assert told.problem.detail == "no sandbox"
    watch.cancel()


async def test_reflection_describes_the_service(to_shared: Caller) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(to_shared.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=proto.SERVICE),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
    ]
    listed, ours, health = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    assert {one.name for one in listed.list_services_response.service} >= {proto.SERVICE, "grpc.health.v1.Health"}
    assert ours.file_descriptor_response.file_descriptor_proto[0] == proto.FILE
    assert health.file_descriptor_response.file_descriptor_proto


async def test_info_is_that_of_http(shared: Service, to_shared: Caller) -> None:
    mine = proto.INFO.read(await to_shared.info_(b""))
    theirs = (await shared.client.get("/v1/info")).json()
    assert mine["version"] == theirs["version"] and mine["limits"] == theirs["limits"]
    assert mine["requests"] == theirs["requests"] and mine["languages"] == theirs["languages"]


async def test_requests_are_counted_and_logged(service: Service, one: Caller, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "exec_service.requests")
    await one.run("say secret-code")
    await until(lambda: bool(caplog.records))
    assert await service.metric("exec_grpc_requests_total", method="Run", code="OK") == 1
    said = vars(caplog.records[-1])
    assert (said["method"], said["route"], said["status"], said["calls"]) == ("gRPC", "Run", "OK", 1)
    assert "secret-code" not in str(said)


# -- keys -----------------------------------------------------------------------------------------------------------------


async def test_keys_hold_at_this_door_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key, entry = add_key(file, "lab", max_limits={"memory_mb": 64}, max_calls=2)
    async with running(grpc=True, keys=str(file)) as locked, caller(locked.grpc_target) as nobody:
        health = health_pb2_grpc.HealthStub(nobody.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        with refused("UNAUTHENTICATED", "unauthenticated"):
            await nobody.run("say x")
        with refused("UNAUTHENTICATED", "unauthenticated"):
            await nobody.info_(b"")
        with refused("UNAUTHENTICATED", "unauthenticated"):
            await nobody.cancel(run="r")
        with refused("UNAUTHENTICATED", "unauthenticated"):
            await nobody.stream().read()
        async with caller(locked.grpc_target, key) as lab:
            small = {"memory_mb": 32}
            await lab.run("say x", limits=small)
            assert locked.worker.calls[-1].tenant == "lab"
            with refused("PERMISSION_DENIED", "foreign_tenant") as told:
                await all_results(lab.batch({"code": "x", "limits": small}, {"code": "x", "limits": small, "tenant": "rival"}))
            assert told.problem.field == "$.calls[1].tenant"
            with refused("PERMISSION_DENIED", "beyond_limits") as told:
                await lab.run("say x")
            assert told.problem.field == "$.limits.memory_mb"
            with refused("PERMISSION_DENIED", "foreign_tenant") as told:
                await lab.cancel(run="r", tenant="rival")
            assert told.problem.field == "$.tenant"
            stream = lab.stream()
            await stream.write(calls("hold", "hold", limits=small))
            await stream.write(calls("say x", limits=small))
            [refusal] = proto.RESULT_BATCH.read(await stream.read())["refused"]
            assert refusal["problem"]["code"] == "tenant_busy"
            locked.worker.let_go.set()
            await stream.read()
            assert locked.gateway.keys is not None
            account = locked.gateway.keys.account(f"Bearer {key}")
            await until(lambda: account.calls == 0)
            add_key(file, "other")
            remove_key(file, entry.id)
            await until(lambda: all(entry.tenant != "lab" for entry in locked.gateway.keys._entries.values()))
            await stream.write(calls("say x", limits=small))
            with refused("UNAUTHENTICATED", "unauthenticated"):
                while await stream.read() is not grpc.aio.EOF:
                    pass


# -- life -----------------------------------------------------------------------------------------------------------------


async def test_a_shutdown_answers_what_streams_have_and_ends_them() -> None:
    async with running(grpc=True, drain_s=5) as service, caller(service.grpc_target) as one:
        idle, busy = one.stream(), one.stream()
        await busy.write(calls("hold a"))
        await until(lambda: len(service.worker.calls) == 1)
        single = soon(one.run("hold b"))
        await until(lambda: len(service.worker.calls) == 2)
        service.stop.set()
        assert await drained(idle, 3) is grpc.StatusCode.OK
        assert not single.done()
        service.worker.let_go.set()
        assert [r.stdout for r in await all_results(busy)] == ["a"]
        assert await drained(busy, 3) is grpc.StatusCode.OK
        assert (await single).stdout == "b"


async def test_new_calls_are_refused_while_it_drains(service: Service, one: Caller) -> None:
    service.gateway.dispatch.draining = True
    with refused("UNAVAILABLE", "draining"):
        await one.run("say x")
    with refused("UNAVAILABLE", "draining"):
        await one.stream().read()


async def test_a_port_that_is_taken_is_said_and_never_shared(service: Service) -> None:
    port = service.gateway.config.grpc_port
    with pytest.raises(PortTaken, match=str(port)):
        address_for_grpc("127.0.0.1", port, keys=False)
    async with Gateway(GatewayConfig(port=0, grpc_port=port), MemoryQueue().gateway("g")) as second:
        with pytest.raises(PortTaken, match=str(port)):
            await serve(second, stop=asyncio.Event())


def test_without_keys_only_loopback_may_be_bound() -> None:
    with pytest.raises(BindRefused, match="keys"):
        address_for_grpc("0.0.0.0", 0, keys=False)
    assert address_for_grpc("0.0.0.0", 0, keys=True).startswith("0.0.0.0:")
    assert address_for_grpc("::1", 0, keys=False).startswith("[::1]:")
