"""Which languages are accepted: those of the workers that are alive."""

import msgspec
import pytest
from gateway_harness import ScriptedWorker, Service, problem, running, until

from exec_wire.queue.protocol import WorkerInfo


async def languages(service: Service) -> list[str]:
    found: list[str] = (await service.client.get("/v1/info")).json()["languages"]
    return found


async def test_languages_are_those_of_all_live_workers(service: Service) -> None:
    async with ScriptedWorker(service.queue, "w2", needs=("python", "cpp")):
        await until(lambda: len(service.gateway.worker_registry.workers) == 2)
        assert await languages(service) == ["cpp", "python"]
        assert (await service.run("say hi", language="cpp")).json()["worker"] == "w2"


async def test_missing_language_is_422_and_lists_what_is_there(service: Service) -> None:
    service.worker.info = msgspec.structs.replace(service.worker.info, needs=["python", "bash"])
    await until(lambda: service.gateway.worker_registry.languages == ["bash", "python"])
    body = problem(await service.run(language="cpp"), 422, "unknown_language")
    assert (body["field"], body["detail"]) == ("$.language", "'cpp' is not one of bash, python")
    body = problem(await service.batch({"code": "say x"}, {"code": "say x", "language": "c++"}), 422, "unknown_language")
    assert body["field"] == "$.calls[1].language"


async def test_without_a_worker_what_was_last_known_is_accepted() -> None:
    async with running(worker=False) as service:
        assert await languages(service) == ["python"]
        await service.queue.worker("w2").announce(WorkerInfo("w2", 1, needs=["python", "cpp"]))
        await until(lambda: service.gateway.worker_registry.alive)
        await service.queue.worker("w2").leave()
        await until(lambda: not service.gateway.worker_registry.alive)
        assert await languages(service) == ["cpp", "python"]
        problem(await service.run(language="bash"), 422, "unknown_language")


@pytest.mark.parametrize(
    ("compile_args", "field"),
    [
        (["-O2"] * 33, "$.compile_args"),
        (["-O2", "x" * 257], "$.compile_args[1]"),
        (["-O2", "-DX=\0"], "$.compile_args[1]"),
    ],
    ids=["many", "long", "nul"],
)
async def test_compile_args_that_cannot_be_meant_are_422(shared: Service, compile_args: list[str], field: str) -> None:
    body = problem(await shared.run(compile_args=compile_args), 422, "bad_field")
    assert body["field"] == field


async def test_compile_args_reach_the_worker(service: Service) -> None:
    args = ["-DX=1", "x" * 256, *["-O3"] * 30]
    assert (await service.run(compile_args=args)).status_code == 200
    assert service.worker.calls[0].compile_args == args
