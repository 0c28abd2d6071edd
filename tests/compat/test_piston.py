"""The Piston adapter."""

import base64
from typing import Any

import pytest
from compat_harness import Visitor
from gateway_harness import problem, running, soon, until

STAGE_FIELDS = {"stdout", "stderr", "output", "code", "signal", "message", "status", "cpu_time", "wall_time", "memory"}


async def execute(here: Visitor, content: str, language: str = "python", **fields: Any) -> dict[str, Any]:
    return await here.post("/api/v2/execute", language=language, version="*", files=[{"content": content}], **fields)


async def test_execute_answers_every_field(here: Visitor) -> None:
    code = "import sys; print(input(), *sys.argv[1:]); print('e', file=sys.stderr)"
    made = await execute(here, code, stdin="in", args=["1", "2"], run_timeout=5000, compile_timeout=1000, run_memory_limit=-1)
    assert made.keys() == {"language", "version", "run"} and (made["language"], made["version"]) == ("python", "*")
    ran = made["run"]
    assert ran.keys() == STAGE_FIELDS
    assert (ran["stdout"], ran["stderr"], ran["output"]) == ("in 1 2\n", "e\n", "in 1 2\ne\n")
    assert (ran["code"], ran["signal"], ran["message"], ran["status"]) == (0, None, None, None)
    assert ran["wall_time"] > 0 and ran["cpu_time"] >= 0 and ran["memory"] >= 0


async def test_runtimes_have_what_is_installed_with_names_that_execute_takes(here: Visitor) -> None:
    found = (await here.http.get("/api/v2/runtimes")).json()
    assert {"language": "python", "version": "*", "aliases": ["py", "python3"]} in found
    assert {"language": "c++", "version": "*", "aliases": ["cpp", "g++"]} in found
    assert all(runtime.keys() == {"language", "version", "aliases"} for runtime in found)
    for name in ("py", "python3"):
        assert (await execute(here, "print(1)", name))["language"] == "python"


@pytest.mark.parametrize(
    ("code", "exit_code", "signal", "status"),
    [("raise SystemExit(3)", 3, None, "RE"), ("import os; os.kill(os.getpid(), 11)", None, "SIGSEGV", "SG")],
)
async def test_ends_of_a_program(here: Visitor, code: str, exit_code: int | None, signal: str | None, status: str) -> None:
    ran = (await execute(here, code))["run"]
    assert (ran["code"], ran["signal"], ran["status"]) == (exit_code, signal, status)


async def test_time_and_memory_limits(here: Visitor) -> None:
    late = (await execute(here, "import time; time.sleep(60)", run_timeout=300))["run"]
    assert (late["code"], late["signal"], late["status"]) == (None, "SIGKILL", "TO") and 300 <= late["wall_time"] < 30_000
    greedy = (await execute(here, "bytearray(300 << 20)", run_memory_limit=100 << 20))["run"]
    assert greedy["status"] in ("SG", "RE") and greedy["code"] != 0


async def test_the_first_file_is_the_program_and_others_lie_beside_it(here: Visitor) -> None:
    files = [
        {"name": "main.py", "content": "print(open('a.txt').read(), open('b.bin', 'rb').read(), open('c').read())"},
        {"name": "a.txt", "content": "A"},
        {"name": "b.bin", "content": base64.b64encode(b"\x00\xff").decode(), "encoding": "base64"},
        {"name": "c", "content": "4343", "encoding": "hex"},
    ]
    made = await here.post("/api/v2/execute", language="python", version="3.x", files=files)
    assert made["run"]["stdout"] == "A b'\\x00\\xff' CC\n", made


async def test_a_compiled_language_has_a_compile_stage(here: Visitor) -> None:
    good = await execute(here, '#include <cstdio>\nint main() { puts("hi"); }', "c++")
    assert (good["language"], good["compile"]["code"], good["run"]["stdout"]) == ("c++", 0, "hi\n")
    bad = await execute(here, "int main( {", "cpp")
    assert bad["compile"]["code"] == 1 and "main.cpp:1" in bad["compile"]["stderr"] and bad["run"] == bad["compile"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", ""),
        (b'{"language": "python", "version": "*"}', "files"),
        (b'{"language": "python", "version": "*", "files": []}', ""),
        (b'{"language": "html", "version": "5", "files": [{"content": ""}]}', "html-5 runtime is unknown"),
        (b'{"language": "python", "version": "*", "files": [{"content": "zz", "encoding": "hex"}]}', "hex"),
        (b'{"language": "python", "version": "*", "files": [{"content": ""}, {"content": "", "name": "/etc/x"}]}', "absolute"),
    ],
)
async def test_a_bad_request_is_400_with_a_message(here: Visitor, body: bytes, words: str) -> None:
    answer = await here.http.post("/api/v2/execute", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and words in answer.json()["message"], answer.text


async def test_what_is_not_the_programs_doing_is_no_result() -> None:
    async with running(max_calls=1, max_calls_per_request=1) as service:
        body = {"language": "python", "version": "*", "files": [{"content": "lose"}]}
        assert problem(await service.client.post("/api/v2/execute", json=body), 503, "not_run")["message"]
        held = soon(service.run("hold"))
        await until(lambda: service.gateway.dispatch.admission.calls == 1)
        assert problem(await service.client.post("/api/v2/execute", json=body), 429, "overloaded")["message"]
        service.worker.let_go.set()
        await held
