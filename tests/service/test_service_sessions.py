"""Sessions through a real service: the routes, the client, and what happens when somebody dies."""

import asyncio
import base64
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from common import until, wait_until
from sandbox_harness import NAME_ITSELF, has_come_this_far
from service_harness import Service, see_nothing_left, serving

from exec_client import AsyncClient, AsyncSession, CallerError, Client, Conflict, Forbidden, Limits, SessionLost, Tags
from exec_service.app import Gateway
from exec_service.config import GatewayConfig
from exec_service.tenants.keys import add_key
from exec_wire.messages.sessions import Cell, SessionSpec
from exec_wire.queue.memory import MemoryQueue
from loadtest.support.processes import free_port
from worker.config import WorkerConfig
from worker.consumer import Consumer
from worker.pool import Pool
from worker.sessions import Sessions


def ask(service: Service, verb: str, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    answer = service.http.request(verb, f"/v1/sessions{path}", **fields)
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    return body


def create(service: Service, **spec: Any) -> str:
    id: str = ask(service, "POST", "", json=spec)["id"]
    return id


def run(service: Service, id: str, code: str, **fields: Any) -> dict[str, Any]:
    return ask(service, "POST", f"/{id}/run", json={"code": code, **fields})


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.url) as client:
        yield client


# -- routes -----------------------------------------------------------------------------------------------------------------


def test_session_keeps_its_variables_until_it_is_deleted(service: Service) -> None:
    id = create(service)
    run(service, id, "x = 41")
    result = ask(service, "POST", f"/{id}/run", json={"code": "x + 1", "id": "label"})
    assert (result["status"], result["value"], result["state_kept"], result["id"]) == ("ok", "42", True, "label")
    assert result["sandbox"]["tier"] == "A"
    assert result["timings"]["total_ms"] > 0
    info = ask(service, "GET", f"/{id}")
    assert (info["state"], info["cells"], info["worker"]) == ("idle", 2, "embedded")
    assert info["memory_bytes"] > 0
    assert ask(service, "DELETE", f"/{id}") == {"ended": True, "warnings": []}
    for verb, path in (("GET", ""), ("DELETE", ""), ("GET", "/files?path=a")):
        assert ask(service, verb, f"/{id}{path}", 404)["code"] == "no_such_session"


def test_cells_count_for_the_run_of_their_session(service: Service) -> None:
    id = create(service, tags={"run": "cells", "step": 3})
    [fork] = ask(service, "POST", f"/{id}/fork", json={"n": 1})["sessions"]
    for session, code in ((id, "1"), (id, "1 / 0"), (fork["id"], "1")):
        run(service, session, code)
    stats = service.http.get("/v1/stats", params={"run": "cells"}).json()
    assert (stats["calls"], [step["step"] for step in stats["steps"]]) == (3, [3])
    for session in (id, fork["id"]):
        ask(service, "DELETE", f"/{session}")


def test_forks_are_listed_by_tag_with_their_parent(service: Service) -> None:
    id = create(service, tags={"run": "forks", "step": 3})
    run(service, id, "x = 1")
    forked = ask(service, "POST", f"/{id}/fork", json={"n": 3})["sessions"]
    assert len({fork["id"] for fork in forked}) == 3
    listed = ask(service, "GET", "?run=forks")["sessions"]
    assert {session["id"]: session["parent"] for session in listed} == {id: ""} | {fork["id"]: id for fork in forked}
    assert ask(service, "GET", "?run=forks&step=4")["sessions"] == []
    assert run(service, forked[0]["id"], "x")["value"] == "1"
    for session in listed:
        ask(service, "DELETE", f"/{session['id']}")
    assert ask(service, "GET", "?run=forks")["sessions"] == []


def test_files_go_up_and_down(service: Service) -> None:
    id = create(service, files={"given.txt": base64.b64encode(b"given").decode()})
    ask(service, "PUT", f"/{id}/files", json={"files": {"a/b.txt": base64.b64encode(b"up").decode()}})
    run(service, id, "open('out', 'w').write(open('given.txt').read() + open('a/b.txt').read())")
    got = ask(service, "GET", f"/{id}/files", params={"path": ["out", "missing"]})["files"]
    assert {path: base64.b64decode(content) for path, content in got.items()} == {"out": b"givenup"}
    ask(service, "DELETE", f"/{id}")


def test_rollback_returns_to_before_the_cell(service: Service) -> None:
    id = create(service, auto_checkpoint=True)
    assert ask(service, "POST", f"/{id}/rollback", 409, json={})["code"] == "no_checkpoint"
    run(service, id, "x = 1")
    assert run(service, id, "x = 2\nimport os\nos.abort()")["state_kept"] is False
    assert ask(service, "POST", f"/{id}/run", 409, json={"code": "x"})["code"] == "session_ended"
    assert ask(service, "POST", f"/{id}/rollback", json={})["files_restored"] is True
    assert run(service, id, "x")["value"] == "1"
    ask(service, "DELETE", f"/{id}")


def test_sessions_belong_to_their_tenant(service: Service) -> None:
    id = create(service, tenant="a")
    for verb, path, fields in (
        ("GET", "", {}),
        ("DELETE", "?tenant=b", {}),
        ("POST", "/run", {"json": {"code": "1", "tenant": "b"}}),
        ("POST", "/fork", {"json": {}}),
        ("POST", "/rollback", {"json": {"tenant": "b"}}),
        ("POST", "/interrupt", {"json": {}}),
        ("PUT", "/files", {"json": {"files": {}}}),
        ("GET", "/files?path=x", {}),
    ):
        assert ask(service, verb, f"/{id}{path}", 404, **fields)["code"] == "no_such_session", (verb, path)
    assert ask(service, "GET", "?tenant=b")["sessions"] == []
    assert [session["id"] for session in ask(service, "GET", "?tenant=a")["sessions"]] == [id]
    ask(service, "DELETE", f"/{id}?tenant=a")


async def test_with_keys_a_session_belongs_to_the_tenant_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    lab, _ = add_key(file, "lab", max_limits={"memory_mb": 512, "wall_s": 5})
    other, _ = add_key(file, "other")
    with serving("--keys", str(file), slots=1) as service:
        async with AsyncClient(service.url, api_key=lab) as own, AsyncClient(service.url, api_key=other) as foreign:
            with pytest.raises(Forbidden) as refused:
                await own.session().start()
            assert (refused.value.code, refused.value.field) == ("beyond_limits", "$.limits.memory_mb")
            body, name = {"generated_code": "6 * 7", "timeout": 60}, {"x-session-id": "a"}
            lowered = service.http.post("/execute", json=body, headers=name | {"authorization": f"Bearer {lab}"})
            assert lowered.json()["stdout"] == "42\n"  # a door's clients know no limits; they get those of the key
            foreign_name = service.http.get("/sessions", headers={"authorization": f"Bearer {other}"}).json()
            assert foreign_name["sessions"] == {}
            async with own.session(limits=Limits(memory_mb=256, wall_s=5)) as session:
                assert (await session.run("6 * 7")).value == "42"
                with pytest.raises(Forbidden) as refused:
                    await session.run("1", wall_s=6)
                assert (refused.value.code, refused.value.field) == ("beyond_limits", "$.wall_s")
                strange = AsyncSession(foreign._transport, foreign._policy, SessionSpec(), rebuild=False)
                strange._id = session.id
                for ask in (strange.info, strange.fork, strange.interrupt, lambda: strange.run("1")):
                    with pytest.raises(CallerError, match="no_such_session"):
                        await ask()
                strange._spec = SessionSpec(tenant="lab")
                with pytest.raises(Forbidden) as refused:
                    await strange.run("1")
                assert (refused.value.code, refused.value.field) == ("foreign_tenant", "$.tenant")


@pytest.mark.parametrize(
    ("verb", "path", "body", "field"),
    [
        ("POST", "", {"profile": "pascal"}, "$.profile"),
        ("POST", "", {"ttl_s": 0}, "$.ttl_s"),
        ("POST", "", {"limits": {"memory_mb": 1}}, "$.limits.memory_mb"),
        ("POST", "", {"files": {"../x": ""}}, "$.files['../x']"),
        ("POST", "", {"env": {"a=b": ""}}, "$.env['a=b']"),
        ("POST", "/x.y.z/run", {}, "$.code"),
        ("POST", "/x.y.z/run", {"code": "1", "wall_s": 0}, "$.wall_s"),
        ("POST", "/x.y.z/fork", {"n": 0}, "$.n"),
        ("POST", "/x.y.z/fork", {"n": 65}, "$.n"),
        ("PUT", "/x.y.z/files", {"files": {"a": "not base64"}}, "$.files['a']"),
    ],
)
def test_bad_field_is_named(service: Service, verb: str, path: str, body: dict[str, Any], field: str) -> None:
    problem = ask(service, verb, path, 422, json=body)
    assert (problem["code"], problem["field"]) == ("bad_field", field)


def test_id_that_is_none_is_not_found_and_one_of_another_life_is_lost(service: Service) -> None:
    assert ask(service, "GET", "/nonsense", 404)["code"] == "no_such_session"
    id = create(service)
    worker, life, secret = id.split(".")
    assert ask(service, "GET", f"/{worker}.00000000.{secret}", 410)["code"] == "session_lost"
    assert ask(service, "GET", f"/{worker}.{life}.guess", 404)["code"] == "no_such_session"
    lost = run(service, f"{worker}.00000000.{secret}", "1")
    assert (lost["status"], lost["blame"], lost["retryable"]) == ("session_lost", "infra", False)
    ask(service, "DELETE", f"/{id}")


def test_wrong_method_and_content_type_are_refused(service: Service) -> None:
    assert ask(service, "PUT", "", 405)["code"] == "method_not_allowed"
    answer = service.http.post("/v1/sessions", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.json()["code"] == "wrong_content_type"


def test_sessions_beyond_the_limit_are_refused_until_one_ends() -> None:
    with serving(max_sessions=2, max_sessions_per_tenant=1, slots=1) as service:
        first = create(service)
        refused = ask(service, "POST", "", 429, json={})
        assert (refused["code"], "of this tenant" in refused["detail"]) == ("too_many_sessions", True)
        assert ask(service, "POST", f"/{first}/fork", 429, json={})["code"] == "too_many_sessions"
        create(service, tenant="b")
        refused = ask(service, "POST", "", 429, json={"tenant": "c"})
        assert (refused["code"], refused["retry_after_s"] > 0) == ("too_many_sessions", True)
        ask(service, "DELETE", f"/{first}")
        wait_until(lambda: service.http.post("/v1/sessions", json={}).status_code == 200, "there is room again")


def test_memory_in_use_bounds_new_sessions() -> None:
    with serving(session_memory_mb=50, slots=1) as service:
        id = create(service)
        run(service, id, "x = b'a' * (80 << 20)")
        refused = ask(service, "POST", "", 429, json={})
        assert (refused["code"], "MB used" in refused["detail"]) == ("too_many_sessions", True)
        run(service, id, "del x")
        create(service)


def test_metrics_count_sessions() -> None:
    with serving(slots=1) as service:
        id = create(service, auto_checkpoint=True, ttl_s=600)
        run(service, id, "1")
        ask(service, "POST", f"/{id}/fork", json={"n": 2})
        ask(service, "POST", f"/{id}/rollback", json={})
        create(service, ttl_s=0.5)
        wait_until(lambda: service.metric('exec_sessions_expired_total{worker="embedded"}') == 1, "one expired")
        wait_until(lambda: service.metric('exec_sessions{worker="embedded"}') == 3, "three live")
        assert service.metric('exec_sessions_started_total{worker="embedded"}') == 2
        assert service.metric('exec_sessions_forks_total{worker="embedded"}') == 2
        assert service.metric('exec_sessions_rollbacks_total{worker="embedded"}') == 1
        assert service.metric('exec_session_memory_bytes{worker="embedded"}') > 0
        assert service.metric('exec_http_requests_total{code="200",route="/v1/sessions/{id}/fork"}') == 1


def test_cell_runs_although_calls_fill_every_slot(service: Service) -> None:
    id = create(service)
    with httpx.Client(base_url=service.url, timeout=60) as other:
        calls = [{"code": "import time; time.sleep(0.3)"} for _ in range(12)]
        with other.stream("POST", "/v1/batch", json={"calls": calls}) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert run(service, id, "6 * 7")["value"] == "42"
            assert len(list(lines)) == 11
    ask(service, "DELETE", f"/{id}")


# -- the client -------------------------------------------------------------------------------------------------------------


async def fork_and_roll_back(session: AsyncSession) -> list[AsyncSession]:
    """The forks; x is [1] again."""
    await session.run("x = [1]")
    one, two = await session.fork(2)
    await one.run("x.append(2)")
    assert [(await each.run("x")).value for each in (session, one, two)] == ["[1]", "[1, 2]", "[1]"]
    await session.run("x = None")
    assert await session.rollback()
    return [one, two]


async def test_async_client_runs_forks_and_rolls_back(client: AsyncClient) -> None:
    async with client.session(auto_checkpoint=True, tags=Tags(run="client")) as session:
        one, two = await fork_and_roll_back(session)
        assert (await session.run("x")).value == "[1]"
        await session.put_files({"f": b"bytes"})
        assert (await session.run("open('f').read()")).value == "'bytes'"
        assert await session.fetch_files(["f"]) == {"f": b"bytes"}
        id = session.id
        for fork in (one, two):
            await fork.close()
    async with AsyncClient(client._base_url) as other:
        gone = AsyncSession(other._transport, other._policy, SessionSpec(), rebuild=False)
        gone._id = id
        with pytest.raises(CallerError, match="no_such_session"):
            await gone.info()


async def test_interrupt_from_another_task(client: AsyncClient, service: Service) -> None:
    async with client.session() as session:
        running = asyncio.create_task(session.run(f"import time\nx = 1\n{NAME_ITSELF}\ntime.sleep(60)", wall_s=60))
        await until(lambda: has_come_this_far(service.program_pids), "the variable is set")
        assert await session.interrupt()
        result = await running
        assert (result.exit_code, result.state_kept) == (130, True)
        assert (await session.run("x")).value == "1"


def test_sync_client_has_the_same_session(service: Service) -> None:
    with Client(service.url) as client, client.session() as session:
        session.run("x = 1")
        (fork,) = session.fork()
        with fork:
            fork.run("x = 2")
            assert (session.run("x").value, fork.run("x").value) == ("1", "2")
        with pytest.raises(Conflict) as refused:
            session.rollback()
        assert refused.value.code == "no_checkpoint"


async def test_calls_and_sessions_share_a_client(client: AsyncClient) -> None:
    async with client.session() as session:
        results = await asyncio.gather(*(client.run(f"print({n})") for n in range(20)), session.run("print('cell')"))
    assert [result.stdout for result in results] == [*(f"{n}\n" for n in range(20)), "cell\n"]


async def test_sessions_over_grpc() -> None:
    port = free_port()
    with serving("--grpc-port", str(port), slots=1):
        async with (
            AsyncClient(f"grpc://127.0.0.1:{port}") as client,
            client.session(auto_checkpoint=True, files={"given": b"g"}) as session,
        ):
            one, two = await fork_and_roll_back(session)
            assert (await session.run("x, open('given').read()")).value == "([1], 'g')"
            await session.put_files({"f": b"bytes"})
            assert await session.fetch_files(["f", "none"]) == {"f": b"bytes"}
            assert not await session.interrupt()
            assert (await one.info()).parent == session.id
            with pytest.raises(CallerError, match="at least one path"):
                await session.fetch_files([])
            await session.rollback()
            with pytest.raises(CallerError, match="no_checkpoint"):
                await session.rollback()
            await one.close()
            one._id = two.id[:-3] + "xyz"
            with pytest.raises(CallerError, match="no_such_session"):
                await one.run("1")


# -- deaths -----------------------------------------------------------------------------------------------------------------


def test_caller_who_leaves_does_not_stop_the_cell_and_gets_its_result_later(service: Service) -> None:
    id = create(service)
    run(service, id, "x = 0")
    body = {"code": "import time\ntime.sleep(3)\nx += 1\nx", "idempotency_key": "k"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.url}/v1/sessions/{id}/run", json=body, timeout=2)
    again = ask(service, "POST", f"/{id}/run", json=body)
    assert (again["status"], again["value"]) == ("ok", "1")
    assert ask(service, "POST", f"/{id}/run", json=body)["value"] == "1"
    assert run(service, id, "x")["value"] == "1"
    ask(service, "DELETE", f"/{id}")


async def test_dead_zygote_loses_its_sessions_and_the_client_can_rebuild_them() -> None:
    with serving(slots=1) as service:
        async with AsyncClient(service.url) as client:
            plain = await client.session().start()
            built = await client.session(rebuild=True).start()
            for session in (plain, built):
                await session.run("x = 1")
                await session.run("x += 1")
            await built.put_files({"f": b"x"})
            running = asyncio.create_task(plain.run("import time; time.sleep(60)", wall_s=60))
            while (await plain.info()).state != "running":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            for pid in service.zygote_pids:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(SessionLost) as lost:
                await running
            assert lost.value.result is not None
            assert (lost.value.result.status, lost.value.result.blame) == ("session_lost", "infra")
            with pytest.raises(SessionLost):
                await plain.run("x")
            with pytest.raises(SessionLost):
                await plain.fork()
            await plain.close()
            wait_until(lambda: service.http.get("/readyz").status_code == 200, "ready again")
            old = built.id
            assert (await built.run("x, open('f').read()")).value == "(2, 'x')"
            assert built.id != old
            await built.close()
        wait_until(lambda: not service.program_pids, "nothing is left")


async def test_dead_runner_loses_sessions_and_new_ones_can_be_had() -> None:
    with serving(slots=1) as service:
        id = create(service)
        os.kill(service.runner_pid, signal.SIGKILL)
        wait_until(lambda: run(service, id, "1")["status"] == "session_lost", "it is known to be lost")
        wait_until(lambda: service.http.post("/v1/sessions", json={}).status_code == 200, "another one can be had")


def test_stopped_service_leaves_nothing_of_its_sessions() -> None:
    with serving(slots=1) as service:
        id = create(service)
        run(service, id, "import subprocess; p = subprocess.Popen(['sleep', '100'])")
        pids, block = service.tree, service.block
        service.kill(signal.SIGTERM)
        assert service.wait() == 0
        see_nothing_left(block, pids)


async def test_death_of_a_gateway_is_no_event_for_a_session_and_that_of_its_worker_is_the_end() -> None:
    queue, config = MemoryQueue(), GatewayConfig()
    async with Pool(WorkerConfig(slots=1, profiles={"bare": []})) as pool:
        await pool.wait_ready()
        async with Gateway(config, queue.gateway("two")) as second:
            async with Sessions("w", pool) as sessions, Consumer("w", pool, queue.worker("w"), sessions):
                await second.worker_registry.refresh()
                async with Gateway(config, queue.gateway("one")) as first:
                    id = (await first.sessions.create(SessionSpec(limits=Limits(memory_mb=256)))).id
                    await first.sessions.run(id, Cell("x = 1"))
                    left = asyncio.create_task(
                        first.sessions.run(id, Cell("import time; time.sleep(0.5)\nx += 1\nx", idempotency_key="k"))
                    )
                    await asyncio.sleep(0.2)
                    left.cancel()
                assert (
                    await second.sessions.run(id, Cell("import time; time.sleep(0.5)\nx += 1\nx", idempotency_key="k"))
                ).value == "2"
                assert (await second.sessions.run(id, Cell("x"))).value == "2"
                running = asyncio.create_task(second.sessions.run(id, Cell("import time; time.sleep(60)", wall_s=60)))
                await until(lambda: not pool.free_slots, "the cell runs")
                started = time.monotonic()
            await second.worker_registry.refresh()
            result = await running
            assert (result.status, result.blame, result.retryable) == ("session_lost", "infra", False)
            assert time.monotonic() - started < 20
            assert (await second.sessions.run(id, Cell("x"))).status == "session_lost"
