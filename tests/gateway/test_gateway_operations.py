"""What an operator sees: health, readiness, metrics, info, docs, logs, drain."""

import asyncio
import io
import json
import logging
import signal

import pytest
from gateway_harness import Service, lines, problem, raw_request, running, soon, until

from exec_service.app import Gateway
from exec_service.config import GatewayConfig
from exec_service.telemetry.log_format import JsonLines
from exec_wire.queue.memory import MemoryQueue
from exec_wire.queue.protocol import WorkerInfo


async def test_healthz_is_200_with_or_without_workers() -> None:
    async with running(worker=False) as service:
        response = await service.client.get("/healthz")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_readyz_is_200_only_with_a_live_worker() -> None:
    async with running(worker=False) as service:
        problem(await service.client.get("/readyz"), 503, "not_ready")
        async with service.worker:
            await until(lambda: service.gateway.worker_registry.alive)
            assert (await service.client.get("/readyz")).json() == {"status": "ready", "tier": "A"}
        await until(lambda: not service.gateway.worker_registry.alive)
        problem(await service.client.get("/readyz"), 503, "not_ready")


async def test_without_a_sandbox_calls_and_readyz_are_503_in_words_and_the_rest_works(service: Service) -> None:
    service.gateway.dispatch.not_ready_because = "no sandbox: user namespaces are switched off"
    refusals = [
        await service.client.get("/readyz"),
        await service.run(),
        await service.run(require_tier="S"),
        await service.batch({"code": "say x"}),
        await service.batch({"code": "say x"}, stream="false"),
    ]
    for response in refusals:
        body = problem(response, 503, "not_ready")
        assert body["detail"] == "no sandbox: user namespaces are switched off"
        assert int(response.headers["retry-after"]) == body["retry_after_s"] == service.gateway.config.retry_after_max_s
    for route in ("/healthz", "/metrics", "/v1/info", "/docs", "/openapi.json"):
        assert (await service.client.get(route)).status_code == 200
    assert (await service.client.delete("/v1/calls?run=r")).json() == {"cancelled": 0}
    assert service.worker.jobs == []

    service.gateway.dispatch.not_ready_because = ""
    assert (await service.client.get("/readyz")).status_code == 200
    assert (await service.run()).status_code == 200


async def test_draining_is_said_before_the_want_of_a_sandbox(service: Service) -> None:
    service.gateway.dispatch.not_ready_because = "no sandbox"
    await service.gateway.drain(0)
    problem(await service.client.get("/readyz"), 503, "draining")
    problem(await service.run(), 503, "draining")


async def test_info_says_what_is_here(service: Service) -> None:
    info = (await service.client.get("/v1/info")).json()
    assert info["version"]
    assert (info["tier"], info["layers"], info["slots"], info["workers"]) == ("A", ["seccomp", "landlock"], 4, 1)
    assert (info["profiles"], info["languages"]) == (["bare"], ["python"])
    assert info["worker_list"] == [{"id": "w1", "slots": 4, "busy": 0, "tier": "A", "profiles": ["bare"]}]
    assert info["limits"]["default"] == {
        "wall_s": 10,
        "cpu_s": 21,
        "memory_mb": 512,
        "output_kb": 1024,
        "processes": 64,
        "file_mb": 64,
        "deadline_s": 60,
    }
    assert info["limits"]["maximum"]["wall_s"] == 3600 and info["limits"]["maximum"]["deadline_s"] == 7200
    assert info["requests"] == {
        "max_calls_per_request": 4096,
        "max_body_bytes": 64 << 20,
        "max_calls": 60_000,
        "max_bytes": 1 << 30,
    }


async def test_info_of_several_workers_promises_only_what_all_of_them_have(service: Service) -> None:
    second = service.queue.worker("w2")
    await second.announce(WorkerInfo("w2", 6, tier="C", layers=["landlock"], profiles=["math"]))
    await until(lambda: len(service.gateway.worker_registry.workers) == 2)
    info = (await service.client.get("/v1/info")).json()
    assert (info["tier"], info["layers"], info["slots"], info["profiles"]) == ("C", ["landlock"], 10, ["bare", "math"])
    assert (info["workers"], [(worker["id"], worker["tier"]) for worker in info["worker_list"]]) == (
        2,
        [("w1", "A"), ("w2", "C")],
    )
    assert (await service.client.get("/readyz")).json() == {"status": "ready", "tier": "C"}
    text = (await service.client.get("/metrics")).text.splitlines()
    assert {'exec_sandbox_layer{layer="seccomp"} 0.0', 'exec_sandbox_layer{layer="landlock"} 1.0'} <= set(text)
    assert {'exec_sandbox_tier{tier="A"} 1.0', 'exec_sandbox_tier{tier="C"} 1.0'} <= set(text)
    assert service.gateway.worker_registry.best_tier == "A"
    assert service.gateway.worker_registry.window == 13  # ceil(1.25 x 10)


async def test_the_list_of_workers_is_not_read_per_request(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.sleep(0.05)  # whatever refresh is under way
    service.gateway.worker_registry._refresh_s = 60
    await asyncio.sleep(0.05)
    reads = 0

    async def counted() -> list[WorkerInfo]:
        nonlocal reads
        reads += 1
        return []

    monkeypatch.setattr(service.gateway.worker_registry._queue, "workers", counted)
    for route in ("/readyz", "/v1/info"):
        assert (await service.client.get(route)).status_code == 200
    assert (await service.run()).status_code == 200
    assert reads == 0


async def test_a_list_of_workers_that_cannot_be_read_is_kept(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> list[WorkerInfo]:
        raise ConnectionError("the queue is away")

    monkeypatch.setattr(service.gateway.worker_registry._queue, "workers", broken)
    await asyncio.sleep(0.1)
    assert (await service.client.get("/readyz")).status_code == 200


async def test_metrics_count_what_happened(service: Service) -> None:
    await service.batch({"code": "say x"}, {"code": "fail"}, {"code": "lose"})
    await service.run(language="cobol")
    response = await service.client.get("/metrics")
    text = response.text
    assert response.headers["content-type"].startswith("text/plain")
    for line in (
        'exec_calls_total{blame="none",status="ok"} 1.0',
        'exec_calls_total{blame="model",status="error"} 1.0',
        'exec_calls_total{blame="infra",status="worker_lost"} 1.0',
        'exec_rejected_total{reason="unknown_language"} 1.0',
        'exec_stage_seconds_count{stage="queue"} 3.0',
        'exec_stage_seconds_count{stage="run"} 3.0',
        "exec_in_flight 0.0",
        "exec_waiting 0.0",
        "exec_released 0.0",
        "exec_slots 4.0",
        'exec_sandbox_tier{tier="A"} 1.0',
        'exec_sandbox_tier{tier="B"} 0.0',
        'exec_sandbox_layer{layer="seccomp"} 1.0',
        'exec_sandbox_layer{layer="landlock"} 1.0',
        'exec_sandbox_layer{layer="cgroup"} 0.0',
        'exec_http_requests_total{code="200",route="/v1/batch"} 1.0',
    ):
        assert line in text.splitlines(), line


async def test_metrics_show_the_depth_of_the_queue(service: Service) -> None:
    answering = soon(service.batch(*({"code": "hold"} for _ in range(8))))
    await until(lambda: len(service.gateway.dispatch.released) == 5)
    text = (await service.client.get("/metrics")).text.splitlines()
    assert {"exec_in_flight 8.0", "exec_waiting 3.0", "exec_released 5.0"} <= set(text)
    service.worker.let_go.set()
    await answering


async def test_an_unknown_path_does_not_become_a_label(service: Service) -> None:
    await service.client.get("/secret-path")
    text = (await service.client.get("/metrics")).text
    assert "secret-path" not in text
    assert 'exec_http_requests_total{code="404",route="other"} 1.0' in text


async def test_two_gateways_in_one_process_do_not_share_metrics(service: Service) -> None:
    await service.run()
    other = Gateway(GatewayConfig(), MemoryQueue().gateway("g2"))
    assert other.metrics.registry.get_sample_value("exec_calls_total", {"status": "ok", "blame": "none"}) == 0


async def test_openapi_has_the_schemas_of_the_messages(service: Service) -> None:
    document = (await service.client.get("/openapi.json")).json()
    assert {"/v1/run", "/v1/batch", "/v1/info", "/healthz", "/readyz", "/metrics"} <= set(document["paths"])
    run = document["paths"]["/v1/run"]["post"]
    assert run["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Call"}
    assert {"200", "400", "413", "415", "422", "429", "503"} <= set(run["responses"])
    batch = document["paths"]["/v1/batch"]["post"]
    assert set(batch["responses"]["200"]["content"]) == {"application/json", "application/x-ndjson"}
    schemas = document["components"]["schemas"]
    assert schemas["Limits"]["properties"]["wall_s"]["maximum"] == 3600
    for reference in _references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in _references(value)]
    return [found for value in node for found in _references(value)] if isinstance(node, list) else []


async def test_docs_are_one_page_that_loads_only_its_own_script(service: Service) -> None:
    response = await service.client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "/v1/batch" in response.text and 'id="Call"' in response.text
    own = '<script src="/web/docs.js" type="module"></script>'
    assert response.text.count(own) == 1
    for loads in ("<script", "<link", "<img", "src=", "http://", "https://"):
        assert loads not in response.text.replace(own, "")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.stream = io.StringIO()
        self.setFormatter(JsonLines())

    def emit(self, record: logging.LogRecord) -> None:
        self.stream.write(self.format(record) + "\n")

    @property
    def written(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def log_lines() -> object:
    handler, logger = Lines(), logging.getLogger("exec_service")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_one_json_line_per_request_and_never_the_code(service: Service, log_lines: Lines) -> None:
    await service.client.post(
        "/v1/batch",
        json={"calls": [{"code": "say SECRET", "stdin": "SECRET", "env": {"SECRET": "SECRET"}}]},
        headers={"x-request-id": "req-9", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    )
    await service.run("SECRET", language="SECRET")
    await service.client.get("/healthz")
    batch, refused = log_lines.written
    assert (batch["event"], batch["method"], batch["route"], batch["status"]) == ("request", "POST", "/v1/batch", 200)
    assert (batch["request_id"], batch["calls"], batch["level"]) == ("req-9", 1, "info")
    assert str(batch["traceparent"]).startswith("00-0af7")
    assert (refused["status"], refused["code"], refused["level"]) == (422, "unknown_language", "warning")
    assert "SECRET" not in log_lines.stream.getvalue()


async def test_refusals_and_results_that_are_our_fault_are_warnings_with_their_reason(
    service: Service, log_lines: Lines
) -> None:
    logging.getLogger("exec_service").setLevel(logging.WARNING)  # the default: requests that went well are not there
    await service.run()
    await service.client.get("/v1/nothing")
    holding = soon(service.batch(*({"code": "hold"} for _ in range(5))))
    await until(lambda: len(service.worker.jobs) == 5)  # the first, and one for each slot
    late = await service.run("say SECRET", deadline_s=0.05, tenant="lab")
    service.worker.let_go.set()
    await holding
    refused, failed = log_lines.written
    assert (refused["event"], refused["route"], refused["status"], refused["code"]) == ("request", "other", 404, "not_found")
    assert (failed["level"], failed["logger"], failed["status"]) == ("warning", "exec_service.results", "expired")
    assert failed["reason"] == late.json()["error"] == "the deadline passed while the call waited for a slot"
    assert (failed["tenant"], failed["request_id"]) == ("lab", late.headers["x-request-id"])
    assert "SECRET" not in log_lines.stream.getvalue()


async def test_a_caller_who_left_is_logged_as_such(service: Service, log_lines: Lines) -> None:
    leaving = soon(service.run("hold"))
    await until(lambda: len(service.worker.jobs) == 1)
    leaving.cancel()
    await until(lambda: bool(log_lines.written))
    assert log_lines.written[0]["status"] == 499


async def test_a_fault_of_ours_is_logged_with_its_request(
    service: Service, log_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the reason")

    monkeypatch.setattr(service.gateway.dispatch, "accept", broken)
    response = await service.run()
    error = next(line for line in log_lines.written if line["level"] == "error")
    assert "the reason" in str(error["traceback"])
    assert error["request_id"] == response.headers["x-request-id"]


async def test_draining_refuses_new_work_and_finishes_what_is_there(service: Service) -> None:
    answering = soon(service.batch(*({"code": "hold"} for _ in range(8))))
    await until(lambda: len(service.worker.jobs) == 4)
    draining = soon(service.gateway.drain(300))
    await asyncio.sleep(0)
    problem(await service.run(), 503, "draining")
    problem(await service.client.get("/readyz"), 503, "draining")
    assert (await service.client.get("/healthz")).status_code == 200
    assert not draining.done()
    service.worker.let_go.set()
    await asyncio.wait_for(draining, 30)
    assert [result.status for result in lines(await answering)] == ["ok"] * 8


async def test_what_is_unfinished_when_the_drain_is_over_is_answered(service: Service) -> None:
    answering = soon(service.batch(*({"code": "hold"} for _ in range(8))))
    await until(lambda: len(service.worker.jobs) == 4)
    await service.gateway.drain(0.05)
    results = lines(await answering)
    assert [(result.status, result.blame, result.retryable) for result in results] == [("internal_error", "infra", True)] * 8
    await until(lambda: len(service.worker.cancelled) == 4)


async def test_stopping_the_server_finishes_what_was_accepted() -> None:
    async with running(drain_s=30) as service:
        answering = soon(service.run("hold"))
        await until(lambda: len(service.worker.jobs) == 1)
        service.stop.set()
        await until(lambda: service.gateway.dispatch.draining)
        service.worker.let_go.set()
        assert (await answering).json()["status"] == "ok"


async def test_serving_installs_no_signal_handlers() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with running():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_ipv6_loopback_is_served() -> None:
    try:
        async with running(host="::1") as service:
            assert service.url.startswith("http://[::1]:")
            assert (await service.run()).status_code == 200
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


async def test_head_of_answers_says_nothing_of_the_server(service: Service) -> None:
    answer = await raw_request(service.port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b"\r\nserver:" not in answer.lower()
