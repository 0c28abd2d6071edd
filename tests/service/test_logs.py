"""What a process writes to standard error: one format, from one thread, whoever reads it or does not."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from common import PATIENCE_S, wait_until
from service_harness import JSON, ROOT, Service, command, environment, serving

F_SETPIPE_SZ = 1031
TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\dT\S+ (debug|info|warning|error|critical) +[\w.]+: ")


def lines_of(words: str) -> list[dict[str, Any]]:
    """Every line is an object of the same format."""
    found = [json.loads(line) for line in words.splitlines()]
    assert all({"time", "level", "logger", "event"} <= line.keys() for line in found), words
    return found


def write_raw(service: Service, words: str) -> None:
    """As a C library does that knows no loggers."""
    Path(f"/proc/{service.process.pid}/fd/2").write_text(words)


def test_every_line_of_a_service_is_json_also_what_others_write_to_its_standard_error() -> None:
    with serving(log_format="json", log_level="info") as service:
        service.http.post("/v1/run", content=b'{"code": "SECRET = 1"}', headers=JSON | {"x-request-id": "req-7"})
        service.http.post("/v1/run", content=b'{"code": 3}', headers=JSON)
        write_raw(service, "E0000 raw words of a library\n")
        wait_until(lambda: "raw words" in service.words, "the line is there")
        words = service.words
    found = lines_of(words)
    [ran, refused] = [line for line in found if line["logger"] == "exec_service.requests"]
    assert (ran["level"], ran["method"], ran["route"], ran["status"], ran["calls"]) == ("info", "POST", "/v1/run", 200, 1)
    assert ran["request_id"] == "req-7" and ran["duration_ms"] > 0
    assert (refused["level"], refused["status"], refused["code"]) == ("warning", 422, "bad_field")
    [raw] = [line for line in found if "raw words" in line["event"]]
    assert (raw["level"], raw["logger"], raw["event"]) == ("warning", "stderr", "E0000 raw words of a library")
    assert any("is ready on" in line["event"] for line in found)
    assert "SECRET" not in words


def test_text_has_one_form_too_and_a_line_cannot_be_forged() -> None:
    with serving(log_format="text", log_level="info") as service:
        service.http.post("/v1/run", content=b'{"code": "print(1)"}', headers=JSON)
        write_raw(service, "raw\x1b[31m words\n")
        wait_until(lambda: "words" in service.words.partition("Ctrl-C")[2], "the line is there")
        lines = service.words.partition("Ctrl-C.\n")[2].strip().splitlines()
    assert all(TEXT_LINE.match(line) for line in lines), lines
    assert any(" info    exec_service.requests: request method=POST route=/v1/run status=200 " in line for line in lines)
    assert any(line.endswith("warning stderr: raw\\x1b[31m words") for line in lines)


@pytest.mark.parametrize(("name", "words"), [("log_level", "debug, info, warning, error"), ("log_format", "json, text")])
def test_a_level_or_format_that_there_is_not_stops_the_start_and_names_those_there_are(name: str, words: str) -> None:
    ended = command("up", **{name: "loud"})
    assert ended.returncode == 2 and f"EXEC_{name.upper()}" in ended.stderr and words in ended.stderr


def test_a_service_whose_standard_error_nobody_reads_goes_on_and_stops() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
    os.set_blocking(read, False)
    seen = b""

    def look() -> bytes:
        nonlocal seen
        try:
            seen += os.read(read, 1 << 20)
        except BlockingIOError:
            pass
        return seen

    process = subprocess.Popen(
        [sys.executable, "-m", "exec_service", "up", "--port", "0", "--grpc-port", "0"],
        stderr=write,
        cwd=ROOT,
        env=environment(slots=1, profiles='{"bare": []}', log_level="info", log_format="json"),
        start_new_session=True,
    )
    os.close(write)
    try:
        wait_until(lambda: b"is ready on" in look(), "the service is ready", 60)
        url = re.search(rb"is ready on (http://[0-9.:]+)", seen)
        assert url is not None
        with httpx.Client(base_url=url[1].decode(), timeout=60) as client:
            for _ in range(100):  # several times what the pipe holds
                assert client.get("/v1/info").status_code == 200
            assert client.post("/v1/run", json={"code": "print(1)"}).json()["stdout"] == "1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0  # although nobody has read the rest
        wait_until(lambda: seen == look(), "all is read")
        requests = [line for line in seen.decode().splitlines() if '"/v1/info"' in line]
        assert 5 < len(requests) < 100  # what the pipe held; the rest had nowhere to go
    finally:
        process.kill()
        process.wait()
        os.close(read)


STALLED = """
import logging, os, sys
from exec_service.telemetry import logs
logs.start_logs("info", "json")
for number in range(60_000):
    logging.getLogger("many").info("line %d", number, extra={"padding": "x" * 80})
print(logs.dropped_lines(), flush=True)
sys.stdin.readline()
"""


def test_lines_beyond_the_queue_are_dropped_counted_and_reported_when_somebody_reads_again() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STALLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        dropped = int(process.stdout.readline())  # all are logged while nobody reads
        assert 0 < dropped < 60_000
        found: list[dict[str, Any]] = []
        reading = threading.Thread(target=lambda: found.extend(map(json.loads, process.stderr or ())), daemon=True)
        reading.start()
        wait_until(lambda: any("dropped" in line for line in found), "the loss is reported")
        process.stdin.close()
        reading.join(PATIENCE_S)
    [report] = [line for line in found if "dropped" in line]
    assert (report["dropped"], report["level"]) == (dropped, "warning")
    assert "dropped" in report["event"] and len(found) == 60_001 - dropped


def test_dropped_lines_are_a_metric(service: Service) -> None:
    assert "exec_log_lines_dropped_total 0.0" in service.http.get("/metrics").text


def test_lines_of_celery_have_the_same_format(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "exec_service", "jobs-worker", "--redis", "redis://127.0.0.1:9/0", "--jobs-dir", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(log_format="json"),
    ) as process:
        assert process.stderr is not None
        try:
            while not (line := lines_of(process.stderr.readline())[0])["logger"].startswith("celery"):
                pass
        finally:
            process.kill()
    assert "Cannot connect" in line["event"]
