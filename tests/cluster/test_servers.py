"""Which Redis or Valkey server is started: all that are there are known, and one can be chosen."""

import shutil
import sys
from pathlib import Path

import pytest
from redis_harness import need_redis, server_params

from loadtest.chaos import __main__ as chaos
from loadtest.chaos import soak
from loadtest.support import redis_server


def put_program(folder: Path, name: str, words: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{words}'\n")
    path.chmod(0o755)
    return str(path)


def test_every_server_of_the_path_is_found_once_and_the_first_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put_program(tmp_path / "one", "redis-server", "Redis server v=99.1.0 sha=0")
    second = put_program(tmp_path / "two", "valkey-server", "Valkey server v=98.0.0 sha=0")
    (tmp_path / "two" / "redis-server").symlink_to(second)  # as Valkey's packages have it
    monkeypatch.setenv("PATH", f"{tmp_path}/one:{tmp_path}/two:{tmp_path}/none:{tmp_path}/one")
    monkeypatch.delenv("EXEC_REDIS_SERVER", raising=False)
    found = redis_server.servers()
    assert [Path(path).resolve() for path in found[:2]] == [Path(first), Path(second)]
    assert len({Path(path).resolve() for path in found}) == len(found)
    assert redis_server.find_server() == first and redis_server.version() == "Redis server v=99.1.0"


def test_a_server_that_is_named_is_the_one_that_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = put_program(tmp_path, "mine", "Redis server v=99.1.0 sha=0")
    monkeypatch.setenv("EXEC_REDIS_SERVER", chosen)
    assert redis_server.find_server() == chosen
    monkeypatch.setenv("EXEC_REDIS_SERVER", f"{chosen}-no")
    with pytest.raises(redis_server.NoServer, match="is not an executable"):
        redis_server.find_server()


@pytest.mark.parametrize("main", [chaos.main, soak.main])
def test_help_says_how_to_choose_a_server(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])  # type: ignore[operator]
    assert "EXEC_REDIS_SERVER" in capsys.readouterr().out


def test_the_tests_of_a_cluster_run_on_the_systems_server_and_on_the_one_of_pip() -> None:
    need_redis()
    used = {Path(param.values[0]).resolve() for param in server_params()}
    systems = shutil.which("redis-server")
    assert systems is None or Path(systems).resolve() in used
    assert any(path.is_relative_to(sys.prefix) for path in used) and len(used) >= (2 if systems else 1)
