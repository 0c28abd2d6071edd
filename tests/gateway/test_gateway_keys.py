"""API keys: authentication, tenants, and the limits of a tenant."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gateway_harness import JSON, Service, lines, problem, running, soon, until

from exec_client import AsyncClient, Forbidden, Overloaded, Tags
from exec_service.api.listening import bind
from exec_service.api.middleware import Guard
from exec_service.refusals import Refusal
from exec_service.tenants.keys import add_key, read_keys, remove_key
from exec_wire.messages.calls import Limits
from exec_wire.messages.sessions import Create, Order, RunCell, new_session_id

LIMITED = {"max_calls": 3, "calls_per_minute": 10, "max_limits": {"memory_mb": 256, "wall_s": 5}, "max_priority": "eval"}
SMALL = {"memory_mb": 128, "wall_s": 2}


class Locked(Service):
    """A service that asks for keys: of the tenants `lab`, `rival` and `small`, who has limits."""

    keys: dict[str, str]
    file: Path

    def as_(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    async def post(self, who: str, code: str = "say hi", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/run", json={"code": code, **fields}, headers=self.as_(who))


@asynccontextmanager
async def locked(folder: Path, **settings: object) -> AsyncIterator[Locked]:
    file = folder / "keys.json"
    keys = {tenant: add_key(file, tenant)[0] for tenant in ("lab", "rival")}
    keys["small"] = add_key(file, "small", **LIMITED)[0]
    async with running(keys=str(file), **settings) as service:
        service.__class__ = Locked
        assert isinstance(service, Locked)
        service.keys, service.file = keys, file
        yield service


async def eventually(ask: Callable[[], Awaitable[int]], status: int) -> None:
    async with asyncio.timeout(30):
        while await ask() != status:  # noqa: ASYNC110 - somebody else's clock decides
            await asyncio.sleep(0.1)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Locked]:
    async with locked(tmp_path) as service:
        yield service


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Locked]:
    async with locked(tmp_path_factory.mktemp("keys")) as service:
        yield service


async def test_a_key_opens_the_door_whatever_the_host_is_called(shared: Locked) -> None:
    assert (await shared.post("lab")).json()["stdout"] == "hi"
    assert shared.worker.calls[-1].tenant == "lab"
    named = await shared.client.post("/v1/run", json={"code": "say x"}, headers=shared.as_("lab") | {"host": "exec.example"})
    assert named.status_code == 200


async def test_a_key_as_the_password_of_a_url_opens_it_too(shared: Locked) -> None:
    url = shared.url.replace("http://", f"http://anybody:{shared.keys['lab']}@")
    async with httpx.AsyncClient() as plain:
        assert (await plain.post(f"{url}/v1/run", json={"code": "say x"})).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer nonsense", "Bearer exs_", "Token x", "Basic !!!", "Basic eA==", "Bearer " + "x" * 9000],
)
@pytest.mark.parametrize("path", ["/v1/run", "/v1/batch", "/v1/judge", "/v1/verify"])
async def test_no_key_or_a_wrong_one_is_401(shared: Locked, path: str, authorization: str) -> None:
    before = len(shared.worker.calls)
    answer = await shared.client.post(path, json={"code": "say x"}, headers={"authorization": authorization})
    assert "Bearer" in problem(answer, 401, "unauthenticated")["detail"] or "unknown API key" in answer.text
    assert answer.headers["www-authenticate"] == "Bearer"
    assert len(shared.worker.calls) == before


async def test_a_hash_from_the_file_is_no_key(shared: Locked) -> None:
    for entry in read_keys(shared.file).keys:
        for text in (entry.hash, entry.hash.removeprefix("sha256:"), entry.id):
            problem(await shared.client.get("/v1/info", headers={"authorization": f"Bearer {text}"}), 401, "unauthenticated")


async def test_only_probes_the_page_and_the_documentation_need_no_key(shared: Locked) -> None:
    for path in ("/", "/web/main.js", "/healthz", "/readyz", "/docs", "/openapi.json"):
        assert (await shared.client.get(path)).status_code == 200, path
    for path in ("/metrics", "/v1/info", "/v1/stats", "/nothing", "//healthz", "/healthz/", "//", "/web/"):
        problem(await shared.client.get(f"{shared.url}{path}"), 401, "unauthenticated")
    problem(await shared.client.delete("/v1/calls", params={"run": "r"}), 401, "unauthenticated")
    assert (await shared.client.get("/v1/info", headers=shared.as_("lab"))).status_code == 200


async def test_a_route_may_be_opened_to_callers_without_a_key_but_not_to_web_sites(
    shared: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shared.client.get("/healthz")  # the first request makes the stack
    guard = shared.gateway.app.middleware_stack
    while not isinstance(guard, Guard):
        guard = guard.app  # type: ignore[union-attr]
    monkeypatch.setattr(guard, "_keyless", [re.compile("^/v1/run$")])
    assert (await shared.client.post("/v1/run", json={"code": "say x"})).status_code == 200
    site = {"origin": "http://evil.example", "host": "evil.example"}
    problem(await shared.client.post("/v1/run", json={"code": "say x"}, headers=site), 403, "foreign_origin")
    assert (await shared.post("lab")).status_code == 200
    assert shared.worker.calls[-1].tenant == "lab", "a key that is sent counts"
    wrong = {"authorization": "Bearer wrong"}
    problem(await shared.client.post("/v1/run", json={"code": "say x"}, headers=wrong), 401, "unauthenticated")
    problem(await shared.client.post("/v1/batch", json={"calls": []}), 401, "unauthenticated")


async def test_keys_are_never_logged_and_the_tenant_is(shared: Locked, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "exs_" + "w" * 43
    await shared.post("lab")
    await shared.client.post("/v1/run", json={"code": "say x"}, headers={"authorization": f"Bearer {wrong}"})
    await shared.client.get(f"/v1/info?key={wrong}", headers={"authorization": f"Basic {wrong}"})
    records = [record for record in caplog.records if record.name.startswith("exec_service")]
    said = " ".join(str(vars(record)) for record in records)
    assert not any(secret in said for secret in [*shared.keys.values(), wrong])
    assert "unauthenticated" in said and "'tenant': 'lab'" in said


async def test_a_call_in_another_tenants_name_is_403_naming_the_field(shared: Locked) -> None:
    assert (await shared.post("lab", tenant="lab")).status_code == 200
    assert problem(await shared.post("lab", tenant="rival"), 403, "foreign_tenant")["field"] == "$.tenant"
    calls = [{"code": "say a"}, {"code": "say b", "tenant": "rival"}]
    batch = await shared.client.post("/v1/batch", json={"calls": calls}, headers=shared.as_("lab"))
    assert problem(batch, 403, "foreign_tenant")["field"] == "$.calls[1].tenant"
    judge = {"code": "echo", "tests": [{"stdin": "1", "expected": "1"}], "tenant": "rival"}
    problem(await shared.client.post("/v1/judge", json=judge, headers=shared.as_("lab")), 403, "foreign_tenant")
    item = {"answer": "1", "truth": "1", "kind": "exact"}
    verify = {"items": [item, item | {"tenant": "rival"}]}
    answer = await shared.client.post("/v1/verify", json=verify, headers=shared.as_("lab"))
    assert problem(answer, 403, "foreign_tenant")["field"] == "$.items[1].tenant"
    cancel = await shared.client.delete("/v1/calls", params={"run": "r", "tenant": "rival"}, headers=shared.as_("lab"))
    assert problem(cancel, 403, "foreign_tenant")["field"] == "tenant"


async def test_ids_tags_idempotency_keys_and_cancellation_are_the_tenants_own(service: Locked) -> None:
    same: dict[str, Any] = {"id": "same", "tags": {"run": "same", "step": 1}}
    # Idempotency: another tenant's key is free, neither joined while it runs, nor repeated, nor in conflict.
    ours = soon(service.post("lab", "hold ours", **same, idempotency_key="same"))
    await until(lambda: len(service.worker.calls) == 1)
    theirs = await service.post("rival", "say theirs", **same, idempotency_key="same")
    assert (theirs.status_code, theirs.json()["stdout"], theirs.json()["id"]) == (200, "theirs", "same")
    # Cancellation: the same tags, but not theirs.
    gone = await service.client.delete("/v1/calls", params={"run": "same"}, headers=service.as_("rival"))
    assert gone.json() == {"cancelled": 0} and not ours.done()
    service.worker.let_go.set()
    assert (await ours).json()["stdout"] == "ours"
    assert (await service.post("rival", "say theirs", **same, idempotency_key="same")).json()["stdout"] == "theirs"
    assert (await service.post("lab", "hold ours", **same, idempotency_key="same")).json()["stdout"] == "ours"
    assert service.worker.codes == ["hold ours", "say theirs"]
    # And the owner's own cancellation works.
    service.worker.let_go.clear()
    held = soon(service.post("lab", "hold", **same))
    await until(lambda: len(service.worker.calls) == 3)
    gone = await service.client.delete("/v1/calls", params={"run": "same", "tenant": "lab"}, headers=service.as_("lab"))
    assert gone.json() == {"cancelled": 1}
    assert (await held).json()["status"] == "cancelled"


async def test_calls_are_cancelled_by_request_only_with_their_tenants_key(service: Locked) -> None:
    """Neither those that run nor those that come later."""
    headers = service.as_("lab") | {"x-request-id": "same"}
    held = soon(service.client.post("/v1/run", json={"code": "hold"}, headers=headers))
    await until(lambda: len(service.worker.calls) == 1)
    query = {"request": "same", "index": 0}
    gone = await service.client.delete("/v1/calls", params=query, headers=service.as_("rival"))
    assert gone.json() == {"cancelled": 0} and not held.done()
    gone = await service.client.delete("/v1/calls", params=query, headers=service.as_("lab"))
    assert gone.json() == {"cancelled": 1}
    assert (await held).json()["status"] == "cancelled"
    assert (await service.client.post("/v1/run", json={"code": "say x"}, headers=headers)).json()["status"] == "ok"
    theirs = service.as_("rival") | {"x-request-id": "same"}
    assert (await service.client.post("/v1/run", json={"code": "say x"}, headers=theirs)).json()["status"] == "cancelled"


async def test_judging_and_verifying_run_as_the_keys_tenant(service: Locked) -> None:
    judge = {"code": "echo", "tests": [{"stdin": "1", "expected": "1"}] * 3}
    answer = await service.client.post("/v1/judge", json=judge, headers=service.as_("lab"))
    assert answer.json()["verdict"] == "AC"
    assert [call.tenant for call in service.worker.calls] == ["lab"] * 3
    assert service.gateway.keys is not None
    assert service.gateway.keys.account(f"Bearer {service.keys['lab']}").calls == 0


async def test_limits_beyond_the_keys_are_403_naming_the_field(shared: Locked) -> None:
    body = problem(await shared.post("small", limits=SMALL | {"memory_mb": 300}), 403, "beyond_limits")
    assert body["field"] == "$.limits.memory_mb" and "at most 256" in body["detail"]
    calls = [{"code": "say a", "limits": SMALL}, {"code": "say b", "limits": SMALL | {"wall_s": 6}}]
    batch = await shared.client.post("/v1/batch", json={"calls": calls}, headers=shared.as_("small"))
    assert problem(batch, 403, "beyond_limits")["field"] == "$.calls[1].limits.wall_s"
    judge: dict[str, Any] = {"code": "echo", "tests": [{"limits": {"memory_mb": 999, "wall_s": 1}}], "limits": SMALL}
    answer = await shared.client.post("/v1/judge", json=judge, headers=shared.as_("small"))
    assert problem(answer, 403, "beyond_limits")["field"] == "$.tests[0].limits.memory_mb"
    judge = {"code": "echo", "tests": [{}], "limits": SMALL, "checker": {"kind": "program", "code": "x"}}
    answer = await shared.client.post("/v1/judge", json=judge, headers=shared.as_("small"))
    assert problem(answer, 403, "beyond_limits")["field"] == "$.checker"
    answer = await shared.client.post(
        "/v1/verify", json={"answer": "1", "truth": "1", "wall_s": 20}, headers=shared.as_("small")
    )
    assert problem(answer, 403, "beyond_limits")["field"] == "$.wall_s"


async def test_a_keys_own_maxima_are_in_its_info(shared: Locked) -> None:
    small = (await shared.client.get("/v1/info", headers=shared.as_("small"))).json()["limits"]["maximum"]
    lab = (await shared.client.get("/v1/info", headers=shared.as_("lab"))).json()["limits"]["maximum"]
    assert (small["memory_mb"], small["wall_s"], small["file_mb"]) == (256, 5, 1 << 16)
    assert lab["memory_mb"] == 1 << 16


async def test_a_job_says_how_long_its_call_waited_and_how_much_its_tenant_weighs(service: Locked) -> None:
    add_key(service.file, "lab", weight=3)
    await until(lambda: service.gateway.dispatch.waiting.weight_of("lab") == 3)
    calls = [soon(service.post("lab", "hold")) for _ in range(12)]
    await until(lambda: service.gateway.dispatch.admission.calls == 12)
    service.worker.let_go.set()
    assert [(await call).status_code for call in calls] == [200] * 12
    assert {job.weight for job in service.worker.jobs} == {3.0}
    assert service.worker.jobs[-1].waited_ms > service.worker.jobs[0].waited_ms


async def test_a_session_has_the_priority_that_its_key_allows_and_its_cells_the_weight_of_their_tenant(
    service: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_key(service.file, "small", weight=3)
    service.worker.info = msgspec.structs.replace(service.worker.info, max_sessions=1)
    await until(lambda: service.gateway.worker_registry.workers[0].max_sessions == 1)
    await until(lambda: service.gateway.dispatch.waiting.weight_of("small") == 3)
    asked: list[Order] = []

    async def ask(worker: str, order: Order, kind: type[object], deadline_s: float, **_: object) -> object:
        asked.append(order)
        raise Refusal("not_ready")

    monkeypatch.setattr(service.gateway.sessions, "_ask", ask)
    for path, body in (("", {"limits": SMALL}), (f"/{new_session_id('w1', 'life')}/run", {"code": "pass"})):
        await service.client.post(f"/v1/sessions{path}", json=body, headers=service.as_("small"))
    created, cell = asked
    assert isinstance(created, Create) and created.spec.priority == "eval"
    assert isinstance(cell, RunCell) and cell.weight == 3.0


async def test_a_priority_beyond_the_keys_is_served_with_the_keys(service: Locked) -> None:
    for asked in ("train", "eval", "bulk"):
        assert (await service.post("small", f"say {asked}", priority=asked, limits=SMALL)).status_code == 200
    assert [call.priority for call in service.worker.calls] == ["eval", "eval", "bulk"]


async def test_too_many_in_flight_are_429_until_some_are_delivered(service: Locked) -> None:
    held = [soon(service.post("small", f"hold {n}", limits=SMALL)) for n in range(3)]
    await until(lambda: len(service.worker.calls) == 3)
    refused = await service.post("small", limits=SMALL)
    body = problem(refused, 429, "tenant_busy")
    assert 1 <= body["retry_after_s"] <= int(refused.headers["retry-after"]) <= 60
    assert (await service.post("lab")).status_code == 200, "another tenant is not concerned"
    service.worker.let_go.set()
    await asyncio.gather(*held)
    assert (await service.post("small", limits=SMALL)).status_code == 200


async def test_given_up_and_refused_calls_are_no_longer_in_flight(service: Locked) -> None:
    assert service.gateway.keys is not None
    account = service.gateway.keys.account(f"Bearer {service.keys['small']}")
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            await service.client.post(
                "/v1/run", json={"code": "hold", "limits": SMALL}, headers=service.as_("small"), timeout=0.1
            )
    await until(lambda: account.calls == 0)
    conflict = [{"code": f"say {n}", "idempotency_key": "k", "limits": SMALL} for n in range(2)]
    answer = await service.client.post("/v1/batch", json={"calls": conflict}, headers=service.as_("small"))
    problem(answer, 422, "idempotency_conflict")
    assert account.calls == 0
    streamed = await service.client.post(
        "/v1/batch", json={"calls": [{"code": "say x", "limits": SMALL}] * 3}, headers=service.as_("small")
    )
    assert len(lines(streamed)) == 3
    await until(lambda: account.calls == 0)


async def test_the_minute_counts_what_was_accepted_at_every_endpoint(service: Locked) -> None:
    problem(await service.post("small", "say x", limits={"memory_mb": 9999}), 403, "beyond_limits")  # does not count
    calls = {"calls": [{"code": f"say {n}", "limits": SMALL} for n in range(3)]}
    for _ in range(2):
        assert (await service.client.post("/v1/batch", json=calls, headers=service.as_("small"))).status_code == 200
    judge = {"code": "echo", "tests": [{"stdin": "1", "expected": "1"}] * 3, "limits": SMALL}
    assert (await service.client.post("/v1/judge", json=judge, headers=service.as_("small"))).status_code == 200
    refused = await service.client.post("/v1/batch", json=calls, headers=service.as_("small"))
    assert 5 < problem(refused, 429, "rate_limited")["retry_after_s"] <= 12.1
    assert int(refused.headers["retry-after"]) >= 6


async def test_a_request_that_never_fits_is_413_and_not_told_to_come_again(shared: Locked) -> None:
    calls = {"calls": [{"code": f"say {n}", "limits": SMALL} for n in range(4)]}
    answer = await shared.client.post("/v1/batch", json=calls, headers=shared.as_("small"))
    body = problem(answer, 413, "too_many_calls")
    assert "3 in flight" in body["detail"] and "retry_after_s" not in body


async def test_the_client_makes_smaller_requests_for_a_key_that_may_have_few_in_flight(service: Locked) -> None:
    async with AsyncClient(service.url, api_key=service.keys["small"]) as client:
        results = await client.run_many([f"say {n}" for n in range(8)], limits=Limits(memory_mb=64, wall_s=1), deadline_s=120)
    assert [result.stdout for result in results] == [str(n) for n in range(8)]


async def test_the_file_is_read_again_when_it_changes(service: Locked) -> None:
    new, entry = add_key(service.file, "new", weight=3)
    header = {"authorization": f"Bearer {new}"}

    async def answered() -> int:
        return (await service.client.get("/v1/info", headers=header)).status_code

    await eventually(answered, 200)
    keys = service.gateway.keys
    assert keys is not None
    assert [keys.weight(tenant) for tenant in ("new", "lab", "who")] == [3, 1, 1]
    remove_key(service.file, entry.id)
    await eventually(answered, 401)


async def test_a_file_that_breaks_leaves_the_keys_in_force_and_is_logged(
    service: Locked, caplog: pytest.LogCaptureFixture
) -> None:
    whole = service.file.read_bytes()
    for broken in (b"{", b'{"keys": [{"id": "x"}]}', b'{"kees": []}', None):
        caplog.clear()
        service.file.unlink() if broken is None else service.file.write_bytes(broken)
        await until(lambda: "keeping the keys read before" in caplog.text)
        assert (await service.post("lab")).status_code == 200
    service.file.write_bytes(whole)


async def test_changed_limits_hold_for_the_next_call(service: Locked) -> None:
    assert (await service.post("small", limits=SMALL)).status_code == 200
    add_key(service.file, "small", max_limits={"memory_mb": 64})

    async def answered() -> int:
        return (await service.post("small", limits=SMALL)).status_code

    await eventually(answered, 403)


def test_with_keys_other_addresses_may_be_bound() -> None:
    with bind("0.0.0.0", 0, keys=True) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


async def test_the_client_sends_its_key_given_or_from_the_environment(shared: Locked, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncClient(shared.url, api_key=shared.keys["lab"]) as client:
        assert (await client.run("say x")).stdout == "x"
        assert await client.cancel(run="none") == 0
        assert (await client.info()).version
        with pytest.raises(Forbidden, match="another tenant") as error:
            await client.run("say x", tenant="rival", tags=Tags(run="r"))
        assert (error.value.code, error.value.field, error.value.status) == ("foreign_tenant", "$.tenant", 403)
    async with AsyncClient(shared.url, api_key="exs_wrong") as client:
        with pytest.raises(Forbidden) as error:
            await client.run("say x")
        assert (error.value.code, error.value.status) == ("unauthenticated", 401)
    monkeypatch.setenv("EXEC_API_KEY", shared.keys["rival"])
    async with AsyncClient(shared.url) as client:
        await client.run("say x")
        assert shared.worker.calls[-1].tenant == "rival"
    async with AsyncClient(shared.url, headers={"Authorization": f"Bearer {shared.keys['lab']}"}) as client:
        await client.run("say x")
        assert shared.worker.calls[-1].tenant == "lab"


async def test_the_client_waits_as_long_as_a_busy_tenant_is_told(service: Locked) -> None:
    async with AsyncClient(service.url, api_key=service.keys["small"]) as client:
        held = [soon(service.post("small", f"hold {n}", limits=SMALL)) for n in range(3)]
        await until(lambda: len(service.worker.calls) == 3)
        with pytest.raises(Overloaded) as error:
            await client.run("say x", limits=Limits(memory_mb=64, wall_s=1), deadline_s=0.5)
        assert error.value.retry_after_s
        service.worker.let_go.set()
        await asyncio.gather(*held)


async def test_without_keys_the_tenant_is_the_calls() -> None:
    async with running() as open_:
        answer = await open_.client.post("/v1/run", json={"code": "say x", "tenant": "anybody"}, headers=JSON)
        assert answer.status_code == 200
        assert open_.worker.calls[-1].tenant == "anybody"


async def test_only_an_operators_key_sees_the_metrics_and_the_figures_of_other_tenants(service: Locked) -> None:
    service.keys["root"] = add_key(service.file, "ops", operator=True)[0]

    async def metrics(who: str) -> httpx.Response:
        return await service.client.get("/metrics", headers=service.as_(who))

    async def answered() -> int:
        return (await metrics("root")).status_code

    await eventually(answered, 200)  # when the file was read again
    await service.post("lab")
    await service.post("rival")
    assert 'exec_tenant_calls_total{blame="none",tenant="rival"} 1.0' in (await metrics("root")).text
    refused = await metrics("lab")
    assert (refused.status_code, refused.json()["code"]) == (403, "operators_only")
    assert "keys add --operator" in refused.json()["detail"] and "rival" not in refused.text

    async def tenants(who: str, query: str = "") -> set[str]:
        stats = await service.client.get(f"/v1/stats{query}", headers=service.as_(who))
        return {share["tenant"] for share in stats.json()["tenants"]}

    assert await tenants("lab") == {"lab"}
    assert await tenants("root") == {"lab", "rival"}
    assert await tenants("root", "?tenant=rival") == {"rival"}
