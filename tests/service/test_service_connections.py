"""A real service under hostile connections: meanwhile it is alive, programs are right, memory and descriptors are bounded."""

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from common import wait_until
from service_harness import COMMAND, Service, command, serving

from exec_wire import proto
from loadtest.support.processes import free_port

MB = 1 << 20
FILES = 4400  # nsjail needs 4,096
HEAD = b"POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def resident_bytes(service: Service, peak: bool = False) -> int:
    words = Path(f"/proc/{service.process.pid}/status").read_text()
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", words)
    assert found is not None
    return int(found[1]) << 10


def open_files(service: Service) -> int:
    return len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))


def is_well(service: Service, **headers: str) -> None:
    """Over new connections, while the attack goes on."""
    with httpx.Client(base_url=service.url, timeout=60, headers=headers) as other:
        assert other.get("/healthz").status_code == 200
        for number in range(3):
            result = other.post("/v1/run", json={"code": f"print({number} * 7)"}).json()
            assert (result["status"], result.get("stdout")) == ("ok", f"{number * 7}\n"), result


@contextlib.contextmanager
def connections(service: Service, count: int) -> Iterator[list[socket.socket]]:
    address = (httpx.URL(service.url).host, httpx.URL(service.url).port or 0)
    opened = [socket.create_connection(address, 30) for _ in range(count)]
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


def pour(one: socket.socket, piece: bytes, bytes_: int) -> int:
    """Send until the other side has enough; how much it was."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < bytes_:
            sent += one.send(piece)
    return sent


@pytest.fixture(scope="module")
def small() -> Iterator[Service]:
    """With few descriptors, and 64 MB for all that is inside."""
    few = ["prlimit", f"--nofile={FILES}:{FILES}", *COMMAND]
    with serving(command=few, max_bytes=64 * MB, max_body_bytes=32 * MB, max_sessions=4) as small:
        yield small


def test_headers_without_end_take_no_memory(small: Service) -> None:
    before = resident_bytes(small)
    with connections(small, 4) as attackers:
        for one in attackers:
            one.sendall(b"GET /healthz HTTP/1.1\r\nx: ")
            assert pour(one, b"a" * MB, 100 * MB) < 100 * MB
        is_well(small)
    assert resident_bytes(small) - before < 40 * MB


def test_headers_that_never_end_leave_descriptors_to_the_worker(small: Service) -> None:
    with connections(small, FILES + 200) as attackers:
        for number, one in enumerate(attackers):
            with contextlib.suppress(OSError):  # the first ones make room for the others
                one.sendall(b"GET /healthz HTTP/1.1\r\nx: %d" % number)
        is_well(small)
        assert open_files(small) < FILES - 100
    wait_until(lambda: open_files(small) < FILES // 2, "the connections are gone")


def test_unfinished_bodies_count_as_what_is_inside(small: Service) -> None:
    before = resident_bytes(small)
    with connections(small, 12) as attackers:
        for one in attackers:
            one.sendall(HEAD + b"content-length: %d\r\n\r\n" % (30 * MB))
            pour(one, b" " * MB, 29 * MB)
        answers = 0
        for one in attackers:
            one.settimeout(1)
            with contextlib.suppress(OSError):
                answers += b" 429 " in one.recv(64)
        assert answers >= 10  # 32 MB is what unfinished bodies may have
        is_well(small)
        assert resident_bytes(small) - before < 100 * MB
    wait_until(lambda: small.metric("exec_in_flight_bytes") == 0, "all is given back")


async def test_grpc_messages_without_a_key_are_not_read(tmp_path: Path) -> None:
    keys, port = tmp_path / "keys.json", free_port()
    key = command("keys", "add", "--file", str(keys), "--tenant", "me").stdout.split()[-1]
    key = next(word for word in [key, *re.findall(r"exs_\S+", key)] if word.startswith("exs_"))
    with serving("--grpc-port", str(port), keys=keys) as service:
        is_well(service, authorization=f"Bearer {key}")
        before = resident_bytes(service, peak=True)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        methods = [f"{proto.SERVICE}/{name}" for name in ("Run", "RunBatch", "Cancel", "CreateSession")]
        methods += ["grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
        message = b"\x0a" + bytes(48 * MB)
        answers = [channel.stream_stream(f"/{method}")(iter([message]), timeout=60) for method in methods * 2]
        codes = await asyncio.gather(*(answer.code() for answer in answers))
        seen_as = {
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.INTERNAL,
        }  # who still sends may see only that the stream ends
        assert set(codes) <= seen_as, codes
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as quiet:  # nothing is being sent on it
            assert await quiet.stream_stream(f"/{methods[0]}")(iter([]), timeout=60).code() == grpc.StatusCode.UNAUTHENTICATED
        is_well(service, authorization=f"Bearer {key}")
        assert resident_bytes(service, peak=True) - before < 100 * MB
        await channel.close()
