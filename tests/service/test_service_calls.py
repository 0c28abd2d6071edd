"""Calls over plain HTTP, as anybody with curl makes them."""

import base64
import json
import subprocess

import httpx
import pytest
from service_harness import JSON, Service, mixed_case

from exec_wire import Result
from exec_wire.messages.calls import decode_result
from worker.sandbox.tiers import ALL_LAYERS

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FIELDS = set(
    "id index status blame retryable exit_code signal stdout stderr truncated value files usage timings completed sandbox "
    "worker request_id traceparent".split()
)


def test_curl_line_of_the_greeting_prints_42(service: Service) -> None:
    line = next(line for line in service.words.splitlines() if line.strip().startswith("curl"))
    answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120)
    assert json.loads(answer.stdout)["stdout"] == "42\n"


def test_result_has_every_field_and_says_where_it_ran(service: Service) -> None:
    headers = {"x-request-id": "mine-1", "traceparent": TRACEPARENT}
    answer = service.http.post("/v1/run", json={"code": "print(6 * 7)", "id": "label"}, headers=headers)
    body = answer.json()
    assert answer.status_code == 200
    assert body.keys() >= FIELDS
    assert (body["id"], body["index"], body["status"], body["blame"], body["retryable"]) == ("label", 0, "ok", "none", False)
    assert (body["stdout"], body["stderr"], body["exit_code"], body["signal"]) == ("42\n", "", 0, None)
    assert (body["truncated"], body["completed"], body["value"], body["files"]) == (False, True, None, {})
    assert body["sandbox"] == {"tier": "A", "layers": ALL_LAYERS, "profile": "bare"}
    assert body["worker"]
    assert (body["request_id"], body["traceparent"]) == ("mine-1", TRACEPARENT)
    assert answer.headers["x-request-id"] == "mine-1"


def test_result_says_where_the_time_went_and_what_was_used(service: Service) -> None:
    result = service.run("import time\nx = bytearray(20 << 20)\ntime.sleep(0.2)")
    timings, usage = result.timings, result.usage
    assert timings.start_ms > 0
    assert timings.run_ms >= 200
    assert timings.total_ms >= timings.queue_ms + timings.run_ms
    assert usage.wall_s >= 0.2
    assert 0 < usage.cpu_s < usage.wall_s
    assert usage.memory_peak_bytes > 20 << 20
    assert usage.processes_peak >= 1


def test_stream_of_200_mixed_calls_has_exactly_one_right_result_each(service: Service) -> None:
    cases = [mixed_case(number) for number in range(200)]
    body = {"calls": [case.call | {"id": f"c{number}"} for number, case in enumerate(cases)]}
    answer = service.http.post("/v1/batch", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    results = [decode_result(line) for line in answer.content.splitlines()]
    assert sorted(result.index for result in results) == list(range(200))
    assert all(result.id == f"c{result.index}" for result in results)
    assert [problem for result in results if (problem := cases[result.index].problem(result))] == []


def test_first_result_of_a_stream_arrives_while_the_slow_one_runs(service: Service) -> None:
    body = {"calls": [{"code": "import time\ntime.sleep(1)", "id": "slow"}, {"code": "print(1)", "id": "quick"}]}
    with service.http.stream("POST", "/v1/batch", json=body) as answer:
        results = [decode_result(line) for line in answer.iter_lines() if line]
    assert [result.id for result in results] == ["quick", "slow"]
    assert results[0].timings.total_ms < results[1].timings.total_ms


def test_results_without_a_stream_are_in_the_order_of_the_calls(service: Service) -> None:
    codes = ["import time\ntime.sleep(0.3)\nprint(0)", *(f"print({n})" for n in range(1, 20))]
    answer = service.http.post("/v1/batch?stream=false", json={"calls": [{"code": code} for code in codes]})
    results = [Result(**result) for result in answer.json()["results"]]
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]
    assert [result.index for result in results] == list(range(20))


@pytest.mark.parametrize(
    ("draw", "different"),
    [
        ("import random\nprint(random.random())", 5),
        ("import numpy as np\nprint(np.random.rand(), np.random.default_rng().random())", 5),
        ("import random\nrandom.seed(7)\nprint(random.random())", 1),
        ("import numpy as np\nnp.random.seed(7)\nprint(np.random.rand())", 1),
    ],
)
def test_random_numbers_differ_between_calls_unless_seeded(service: Service, draw: str, different: int) -> None:
    assert len({service.run(draw).stdout for _ in range(5)}) == different


def test_wrong_guess_of_a_profile_still_imports(service: Service) -> None:
    assert service.run("name = 'num' + 'py'\nprint(__import__(name).arange(4).sum())").stdout == "6\n"


def test_value_of_the_last_expression_is_echoed_only_when_asked_for(service: Service) -> None:
    assert service.run("x = 6\nx * 7", echo_value=True).value == "42"
    assert service.run("x = 6\nx * 7").value is None


def test_files_go_in_and_come_out(service: Service) -> None:
    sent = bytes(range(256))
    result = service.run(
        "data = open('in/data.bin', 'rb').read()\nopen('/tmp/out.bin', 'wb').write(data[::-1])",
        files={"in/data.bin": base64.b64encode(sent).decode()},
        fetch_files=["out.bin", "never-made"],
    )
    assert result.status == "ok", result.stderr
    assert {path: base64.b64decode(content) for path, content in result.files.items()} == {"out.bin": sent[::-1]}


def test_stdin_argv_and_env_reach_the_program(service: Service) -> None:
    code = "import os, sys\nprint(sys.stdin.read(), sys.argv[1:], os.environ['COLOUR'])"
    assert service.run(code, stdin="héllo", argv=["a", "b c"], env={"COLOUR": "red"}).stdout == "héllo ['a', 'b c'] red\n"


def test_program_sees_nothing_of_the_service(service: Service) -> None:
    code = "import os, sys\nprint([n for n in os.environ if 'EXEC_' in n], 'exec_service' in sys.modules)\nimport httpx"
    result = service.run(code)
    assert result.stdout == "[] False\n"
    assert "ModuleNotFoundError: No module named 'httpx'" in result.stderr


def test_docs_info_health_and_metrics_are_served(service: Service) -> None:
    assert service.http.get("/docs").status_code == 200
    assert service.http.get("/openapi.json").json()["paths"].keys() >= {"/v1/run", "/v1/batch", "/v1/calls"}
    assert service.http.get("/healthz").json() == {"status": "ok"}
    assert service.http.get("/readyz").json() == {"status": "ready", "tier": "A"}
    info = service.http.get("/v1/info").json()
    assert (info["tier"], info["slots"], info["profiles"]) == ("A", 2, ["bare", "numpy"])
    assert service.metric('exec_sandbox_tier{tier="A"}') == 1


def test_bad_call_is_a_problem_that_names_the_field(service: Service) -> None:
    answer = service.http.post("/v1/run", json={"code": "print(1)", "limits": {"wall_s": -1}})
    problem = answer.json()
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert (problem["code"], problem["field"]) == ("bad_field", "$.limits.wall_s")


def test_web_site_in_a_browser_cannot_run_code(service: Service) -> None:
    body = b'{"code": "print(1)"}'
    foreign = {"origin": "https://site.example"}
    assert httpx.post(f"{service.url}/v1/run", content=body, headers=JSON | foreign).status_code == 403
    assert httpx.post(f"{service.url}/v1/run", content=body, headers=JSON | {"host": "site.example"}).status_code == 403
    assert httpx.post(f"{service.url}/v1/run", content=body, headers={"content-type": "text/plain"}).status_code == 415
