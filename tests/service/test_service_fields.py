"""Whatever its fields hold, a request costs little: it is refused with the field's name, and others are served meanwhile."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from service_harness import JSON, Service, serving

from exec_wire import proto
from loadtest.support.processes import free_port

STALL_S = 0.25  # of CPU time: how long the event loop may do something else than answer
DEEP = "/".join(["d" * 20] * 40)
MANY = 500_000


@pytest.fixture(scope="module")
def strained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    port = free_port()
    with serving("--grpc-port", str(port), "--jobs-dir", str(tmp_path_factory.mktemp("jobs"))) as service:
        service.grpc = grpc.insecure_channel(f"127.0.0.1:{port}")  # type: ignore[attr-defined]
        yield service


def cpu_s(service: Service) -> float:
    """Of the thread that runs the gateway's event loop, which is the main one."""
    pid = service.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def longest_stall_s(service: Service, attack: Callable[[], None]) -> float:
    """The most CPU time that the loop's thread took while /healthz waited for its answer."""
    attacker = threading.Thread(target=attack)
    longest = 0.0
    with httpx.Client(base_url=service.url, timeout=60) as health:
        health.get("/healthz")
        attacker.start()
        while attacker.is_alive():
            before = cpu_s(service)
            assert health.get("/healthz").status_code == 200
            longest = max(longest, cpu_s(service) - before)
        attacker.join()
    return longest


def text_list(count: int) -> bytes:
    return b"[" + b",".join(b'"f%d"' % number for number in range(count)) + b"]"


def text_map(count: int) -> bytes:
    return b"{" + b",".join(b'"f%d":""' % number for number in range(count)) + b"}"


def deep_files(count: int = 3600) -> bytes:
    return b"{" + b",".join(b'"%s/%d":""' % (DEEP.encode(), number) for number in range(count)) + b"}"


def call(field: str, value: bytes) -> bytes:
    return b'{"code": "print(1)", "%s": %s}' % (field.encode(), value)


REQUESTS: dict[str, tuple[str, bytes, str]] = {
    "deep_files": ("/v1/run", call("files", deep_files()), "files"),
    "many_files": ("/v1/run", call("files", text_map(MANY)), "files"),
    "many_fetched": ("/v1/run", call("fetch_files", text_list(MANY)), "fetch_files"),
    "many_variables": ("/v1/run", call("env", text_map(60_000)), "env"),
    "many_arguments": ("/v1/run", call("argv", text_list(60_000)), "argv"),
    "long_arguments": ("/v1/run", call("argv", b'["%s"]' % (b"x" * (8 << 20))), "argv"),
    "batch_of_deep_files": ("/v1/batch", b'{"calls": [%s]}' % call("files", deep_files()), "files"),
    "batch_of_many_files": ("/v1/batch", b'{"calls": [%s]}' % b",".join([call("files", text_map(4000))] * 100), "calls"),
    "judge_of_many_arguments": ("/v1/judge", b'{"code": "", "tests": [{"argv": %s}]}' % text_list(60_000), "argv"),
    "judge_of_many_tests": ("/v1/judge", b'{"code": "", "tests": [%s]}' % b",".join([b"{}"] * 2_000_000), "tests"),
    "session_of_deep_files": ("/v1/sessions", b'{"files": %s}' % deep_files(), "files"),
    "session_of_many_variables": ("/v1/sessions", b'{"env": %s}' % text_map(60_000), "env"),
    "fusion_deep_files": ("/run_code", call("files", deep_files()), "files"),
    "piston_many_arguments": (
        "/api/v2/execute",
        b'{"language": "python", "version": "*", "files": [{"content": ""}], "args": %s}' % text_list(60_000),
        "argv",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_of_too_many_parts_is_refused_and_stalls_nobody(strained: Service, name: str) -> None:
    path, body, field = REQUESTS[name]
    answers: list[httpx.Response] = []

    def attack() -> None:
        answers.append(httpx.post(strained.url + path, content=body, headers=JSON, timeout=60))

    stall_s = longest_stall_s(strained, attack)
    [answer] = answers
    assert answer.status_code in (400, 413, 422), answer.text[:500]
    assert field in answer.json()["field"], answer.text[:500]
    assert stall_s < STALL_S
    assert strained.run("print(6 * 7)").stdout == "42\n"


def test_files_put_into_a_session_are_bounded(strained: Service) -> None:
    id = strained.http.post("/v1/sessions", json={}).json()["id"]
    route, body = f"/v1/sessions/{id}/files", b'{"files": %s}' % deep_files()
    stall_s = longest_stall_s(strained, lambda: refuse(strained.http.put(route, content=body, headers=JSON)))
    assert stall_s < STALL_S
    refuse(strained.http.put(route, json={"files": {"x/.": ""}}))
    refuse(strained.http.get(route, params=[("path", "f")] * 5000))
    assert strained.http.put(route, json={"files": {"./a//b": "eA=="}}).status_code == 200
    assert strained.http.get(route, params={"path": "a/./b"}).json()["files"] == {"a/./b": "eA=="}
    result = strained.http.post(f"/v1/sessions/{id}/run", json={"code": "open('a/b').read()"}).json()
    assert result["value"] == "'x'"


def test_what_is_asked_of_a_session_carries_warnings(strained: Service) -> None:
    made = strained.http.post("/v1/sessions", json={"ttl": 9, "limits": {"wall": 1}}).json()
    assert made["warnings"] == ["ttl: unknown field, did you mean ttl_s?", "limits.wall: unknown field, did you mean wall_s?"]
    route = f"/v1/sessions/{made['id']}"
    cell = strained.http.post(f"{route}/run", json={"code": "6 * 7", "timeout": 1}).json()
    assert (cell["value"], cell["warnings"]) == ("42", ["timeout: unknown field"])
    assert strained.http.post(f"{route}/run", json={"code": "6 * 7"}).json()["warnings"] == []
    for verb, path, body in (
        ("POST", "fork", {"n": 1, "zz": 1}),
        ("PUT", "files", {"zz": 1}),
        ("POST", "interrupt", {"zz": 1}),
    ):
        answer = strained.http.request(verb, f"{route}/{path}", json=body)
        assert (answer.status_code, answer.json()["warnings"]) == (200, ["zz: unknown field"])


def test_many_long_paths_can_be_fetched_from_a_session(strained: Service) -> None:
    id = strained.http.post("/v1/sessions", json={"files": {"a": "eA=="}}).json()["id"]
    paths = [f"{number:0200d}" for number in range(2000)]
    fetch = strained.grpc.unary_unary(f"/{proto.SERVICE}/FetchFiles")  # type: ignore[attr-defined]
    answer = fetch(proto.SESSION_REQUEST.write(session=id, fetch={"paths": [*paths, "a"]}), timeout=60)
    assert proto.FILES.read(answer)["files"] == {"a": "eA=="}


def refuse(answer: httpx.Response) -> None:
    assert answer.status_code in (400, 413, 414, 422, 431), answer.text[:500]


def test_a_session_whose_files_do_not_fit_its_memory_is_the_callers_fault(strained: Service) -> None:
    content = "AAAA" * (10 << 20)
    answer = strained.http.post("/v1/sessions", json={"files": {"a": content}, "limits": {"memory_mb": 16}})
    assert (answer.status_code, answer.json()["code"]) == (422, "bad_field"), answer.text


def test_a_job_of_deep_files_is_refused(strained: Service) -> None:
    line = b'{"call": %s}' % call("files", deep_files())
    answers: list[httpx.Response] = []

    def attack() -> None:
        headers = {"content-type": "application/x-ndjson"}
        answers.append(httpx.post(f"{strained.url}/v1/jobs", content=line, headers=headers, timeout=60))

    assert longest_stall_s(strained, attack) < STALL_S
    assert (answers[0].status_code, answers[0].json()["field"][:15]) == (422, "$[0].call.files")


MESSAGES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "many_calls": ("RunBatch", lambda: b"\x0a\x00" * (1 << 20)),
    "many_files": ("Run", lambda: b"".join(b"\x2a\x09\x0a\x07%07d" % number for number in range(300_000))),
    "deep_files": ("Run", lambda: proto.CALL.write(code="", files={f"{DEEP}/{number}": b"" for number in range(3600)})),
    "many_put": (
        "PutFiles",
        lambda: proto.SESSION_REQUEST.write(files={"files": {str(number): b"" for number in range(200_000)}}),
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_grpc_message_of_too_many_parts_is_refused_and_stalls_nobody(strained: Service, name: str) -> None:
    method, make = MESSAGES[name]
    message = make()
    codes: list[Any] = []

    def attack() -> None:
        channel = strained.grpc  # type: ignore[attr-defined]
        ask = (channel.unary_stream if method == "RunBatch" else channel.unary_unary)(f"/{proto.SERVICE}/{method}")
        try:
            list(ask(message, timeout=60)) if method == "RunBatch" else ask(message, timeout=60)
        except grpc.RpcError as error:
            codes.append(error.code())  # type: ignore[attr-defined]

    stall_s = longest_stall_s(strained, attack)
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT]
    assert stall_s < STALL_S
    assert strained.run("print(6 * 7)").stdout == "42\n"


def test_nothing_of_all_this_has_cost_a_zygote(strained: Service) -> None:
    """Runs last: those above have tried."""
    zygotes = strained.zygote_pids
    for files in ({"x/.": ""}, {"x/./": ""}, {"a": "", "/tmp/a/b": ""}):
        for _ in range(3):
            answer = strained.http.post("/v1/run", json={"code": "print(1)", "files": files})
            assert (answer.status_code, answer.json()["code"]) == (422, "bad_field")
    assert strained.zygote_pids == zygotes
    assert strained.metric("exec_worker_zygote_restarts_total") == 0
