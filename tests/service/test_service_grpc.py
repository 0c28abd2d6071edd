"""The whole service over gRPC, and with keys: real programs in the real sandbox."""

import os
import signal
import socket
from pathlib import Path

import httpx
import pytest
from common import wait_until
from service_harness import Service, command, mixed_case, serving

from exec_client import Call, Client, Forbidden
from exec_service.tenants.keys import add_key
from loadtest.support.processes import free_port


def test_programs_run_over_grpc_also_after_the_runner_was_lost() -> None:
    port = free_port()
    with serving("--grpc-port", str(port)) as service, Client(f"grpc://127.0.0.1:{port}") as client:
        assert f"gRPC: port {port}" in service.words
        see_all_right(client)
        # The new runner is started by a process that has grpc loaded.
        lost = service.runner_pid
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: [pid for pid in runners_of(service) if pid != lost], "a new runner")
        see_all_right(client)
        service.kill(signal.SIGTERM)
        assert service.wait() == 0


def see_all_right(client: Client) -> None:
    cases = [mixed_case(number) for number in range(45)]
    results = client.run_many([Call(**case.call) for case in cases])
    assert not [problem for case, result in zip(cases, results, strict=True) if (problem := case.problem(result))]


def runners_of(service: Service) -> list[int]:
    try:
        return [service.runner_pid]
    except (StopIteration, OSError):
        return []


def test_with_keys_the_service_is_reached_from_other_addresses_and_asks_for_one(tmp_path: Path) -> None:
    file, port = tmp_path / "keys.json", free_port()
    key, _ = add_key(file, "lab")
    with serving("--keys", str(file), "--host", "0.0.0.0", "--grpc-port", str(port)) as service:
        assert "Bearer $EXEC_API_KEY" in service.words and key not in service.words
        elsewhere = own_address()
        for url in (service.url.replace("0.0.0.0", elsewhere), f"grpc://{elsewhere}:{port}"):
            with Client(url, api_key=key) as client:
                assert client.run("print(6 * 7)").stdout == "42\n"
            with Client(url, api_key="exs_wrong") as client, pytest.raises(Forbidden):
                client.run("print(1)")
        assert httpx.get(f"{service.url.replace('0.0.0.0', elsewhere)}/readyz").status_code == 200


def own_address() -> str:
    """Not loopback, where the machine has one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def test_another_address_without_keys_is_refused_with_words() -> None:
    ended = command("up", "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2
    assert "exec-service keys add" in ended.stderr and "--keys" in ended.stderr


def test_a_file_without_keys_ends_the_start_with_words(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{}")
    ended = command("up", "--port", "0", "--keys", str(tmp_path / "keys.json"))
    assert ended.returncode == 2 and "no keys; make one: exec-service keys add" in ended.stderr


def test_a_taken_grpc_port_is_an_error_if_it_was_asked_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = command("up", "--port", "0", "--grpc-port", str(taken.getsockname()[1]))
    assert ended.returncode == 69
    assert "gRPC cannot listen on 127.0.0.1:" in ended.stderr and "--grpc-port 0" in ended.stderr


def test_the_usual_grpc_port_is_done_without_if_it_is_taken() -> None:
    from exec_service.cli.up import without_grpc_if_taken
    from exec_service.config import GatewayConfig

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert without_grpc_if_taken(GatewayConfig(grpc_port=port)).grpc_port == 0
    assert without_grpc_if_taken(GatewayConfig(grpc_port=port)).grpc_port == port
