"""`/v1/stats`, the bounded labels of the metrics, and what both keep however much callers send."""

import asyncio
from pathlib import Path

import pytest
from gateway_harness import Service, problem, running, until

from exec_service.telemetry import live_stats, metrics
from exec_service.telemetry.live_stats import LiveStats
from exec_service.telemetry.metric_types import BoundedLabels
from exec_service.telemetry.metrics import Metrics
from exec_service.tenants.keys import add_key
from exec_wire.messages.calls import Result, Sandbox, Tags, Timings, verdict


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def result(status: str = "ok", total_ms: float = 10.0, **fields: object) -> Result:
    timings = Timings(queue_ms=1.0, start_ms=2.0, run_ms=7.0, total_ms=total_ms)
    return verdict(status, timings=timings, **fields)  # type: ignore[arg-type]


async def test_stats_show_calls_latency_workers_shares_and_failures(service: Service) -> None:
    await service.batch({"code": "say hi", "tenant": "lab"}, {"code": "fail", "tenant": "lab"}, {"code": "lose"})
    stats = (await service.client.get("/v1/stats")).json()
    assert stats["calls_per_s"] > 0 and stats["now"]["slots"] == 4
    assert stats["latency_ms"]["total"]["p99"] > 0
    assert [(one["id"], one["tier"]) for one in stats["workers"]] == [("w1", "A")] and stats["tiers"] == {"A": 1}
    assert {one["tenant"]: one["calls"] for one in stats["tenants"]} == {"lab": 2, "": 1}
    assert sum(one["share"] for one in stats["tenants"]) == pytest.approx(1, abs=0.001)
    assert {(one["status"], one["blame"]) for one in stats["failures"]} == {("error", "model"), ("worker_lost", "infra")}
    assert len(stats["seconds"]) == live_stats.SECONDS_KEPT


def test_a_call_of_a_moment_ago_counts_also_if_a_second_has_begun_since() -> None:
    clock = Clock()
    clock.now = 999.9
    told = LiveStats(clock)
    told.note(result(), "lab", Tags())
    clock.now = 1000.95
    assert [one.calls for one in told.tenants()] == [1] and told.calls_per_s() > 0


async def test_stats_of_a_run_are_by_step(service: Service) -> None:
    calls = [{"code": "fail" if n == 0 else "say x", "tags": {"run": "r 1", "step": n // 2}} for n in range(4)]
    await service.batch(*calls)
    run = (await service.client.get("/v1/stats", params={"run": "r 1"})).json()
    assert (run["run"], run["calls"]) == ("r 1", 4)
    assert [(step["step"], step["calls"], step["tool_error_rate"]) for step in run["steps"]] == [(0, 2, 0.5), (1, 2, 0.0)]
    assert run["steps"][0]["statuses"] == {"error": 1, "ok": 1}
    assert run["steps"][0]["total_ms"]["most"] > 0


async def test_a_run_belongs_to_its_tenant(service: Service) -> None:
    await service.run(tags={"run": "r"}, tenant="lab")
    of = {
        tenant: (await service.client.get("/v1/stats", params={"run": "r", "tenant": tenant})).json() for tenant in ("lab", "x")
    }
    assert (of["lab"]["calls"], of["x"]["calls"]) == (1, 0)
    mine = (await service.client.get("/v1/stats", params={"tenant": "x"})).json()
    assert mine["runs"] == mine["tenants"] == mine["failures"] == []


async def test_an_unknown_run_has_no_steps(service: Service) -> None:
    assert (await service.client.get("/v1/stats?run=never")).json() == {"run": "never", "tenant": "", "calls": 0, "steps": []}


async def test_a_key_shows_the_figures_of_its_tenant_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    mine, theirs = (add_key(keys, tenant)[0] for tenant in ("mine", "theirs"))
    async with running(keys=str(keys)) as service:

        def head(key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {key}"}

        for key in (mine, theirs, theirs):
            call = {"code": "fail", "tags": {"run": "r"}}
            assert (await service.client.post("/v1/run", json=call, headers=head(key))).status_code == 200
        stats = (await service.client.get("/v1/stats", headers=head(mine))).json()
        assert [one["tenant"] for one in (*stats["tenants"], *stats["failures"], *stats["runs"])] == ["mine"] * 3
        assert stats["tenants"][0]["share"] == pytest.approx(1 / 3, abs=0.01)
        assert (await service.client.get("/v1/stats?run=r", headers=head(theirs))).json()["calls"] == 2
        problem(await service.client.get("/v1/stats?tenant=theirs", headers=head(mine)), 403, "foreign_tenant")
        problem(await service.client.get("/v1/stats"), 401, "unauthenticated")
        assert (await service.client.get("/")).status_code == 200


@pytest.mark.parametrize(("query", "field"), [("run=", "run"), ("step=1", "step"), ("run=a&run=b", "run")])
async def test_a_query_of_stats_that_cannot_be_meant_is_refused(shared: Service, query: str, field: str) -> None:
    assert problem(await shared.client.get(f"/v1/stats?{query}"), 422, "bad_query")["field"] == field


async def test_the_oldest_wait_is_that_of_the_call_that_waits_longest() -> None:
    async with running(slots=1, worker=False) as service:
        task = asyncio.create_task(service.run("hold", deadline_s=3))
        await until(lambda: bool(service.gateway.dispatch.waiting))
        await asyncio.sleep(0.3)
        assert (await service.client.get("/v1/stats")).json()["now"]["oldest_wait_s"] >= 0.25
        assert await service.metric("exec_queue_oldest_seconds") >= 0.25
        await task
        assert await service.metric("exec_queue_oldest_seconds") == 0


async def test_calls_are_counted_by_run_tenant_door_and_profile(service: Service) -> None:
    await service.run("fail", tags={"run": "r"}, tenant="lab")
    assert await service.metric("exec_run_calls_total", run="r", status="error", blame="model") == 1
    assert await service.metric("exec_run_call_seconds_count", run="r") == 1
    assert await service.metric("exec_tenant_calls_total", tenant="lab", blame="model") == 1
    assert await service.metric("exec_tenant_slot_seconds_total", tenant="lab") == pytest.approx(0.003)
    assert await service.metric("exec_adapter_calls_total", adapter="own", status="error", blame="model") == 1
    assert await service.metric("exec_profile_start_seconds_count", profile="none") == 1


def test_only_the_last_runs_have_a_label_and_the_rest_is_other() -> None:
    counted = Metrics()
    for number in range(metrics.RUNS + 5):
        counted.finished(result(), tags=Tags(run=f"r{number}"))
    value = counted.registry.get_sample_value
    labels = {"status": "ok", "blame": "none"}
    assert value("exec_run_calls_total", labels | {"run": "other"}) == 5
    assert value("exec_run_calls_total", labels | {"run": "r0"}) == 1
    series = sum(line.startswith("exec_run_calls_total{") for line in counted.text().decode().splitlines())
    assert series == (metrics.RUNS + 1) * len(metrics.ENDS)


def test_a_run_that_is_over_makes_room_and_its_series_go() -> None:
    clock, forgotten = Clock(), list[str]()
    names = BoundedLabels(2, 300, forgotten.append, clock)
    assert [names.label(name) for name in ("a", "b", "c", "")] == ["a", "b", "other", "none"]
    clock.now += 200
    assert names.label("a") == "a"
    clock.now += 200
    assert (names.label("c"), forgotten) == ("c", ["b"])
    assert names.label("d") == "other"


def test_forgotten_labels_leave_no_series() -> None:
    counted = Metrics()
    counted.finished(result(), tenant="gone", tags=Tags(run="gone"))
    counted._forget_run("gone")
    counted._forget_tenant("gone")
    assert b'"gone"' not in counted.text()


def test_the_profile_of_the_sandbox_is_a_label() -> None:
    counted = Metrics()
    counted.finished(result(sandbox=Sandbox("A", [], "numpy")))
    assert counted.registry.get_sample_value("exec_profile_start_seconds_count", {"profile": "numpy"}) == 1


def test_a_sketch_finds_quantiles_to_a_twentieth() -> None:
    kept = LiveStats(Clock())
    for ms in range(1, 1001):
        kept.note(result(total_ms=float(ms)), "", Tags())
    found = kept.latency_ms()["total"]
    assert found.p50 == pytest.approx(500, rel=0.06)
    assert found.p99 == pytest.approx(990, rel=0.06)
    assert found.most == 1000


def test_a_tally_is_bounded_whatever_is_sent() -> None:
    clock = Clock()
    kept = LiveStats(clock)
    for number in range(3000):
        clock.now += 0.1
        kept.note(result("error"), f"t{number}", Tags(run=f"r{number % 30}", step=number))
        kept.note(result("error"), "t", Tags(run="long", step=number))
    assert len(kept.runs()) == live_stats.RUNS_KEPT
    assert len(kept.run("long", "t").steps) == live_stats.STEPS_KEPT
    assert len(kept.failures()) == live_stats.FAILURES_KEPT
    assert len(kept._seconds) <= live_stats.SECONDS_KEPT + 1


def test_failures_of_programs_do_not_push_out_those_of_the_service() -> None:
    kept = LiveStats()
    kept.note(result("worker_lost"), "", Tags())
    for _ in range(200):
        kept.note(result("error"), "", Tags())
    assert kept.failures()[-1].status == "worker_lost"


def test_what_is_older_than_the_window_does_not_count() -> None:
    clock = Clock()
    kept = LiveStats(clock)
    kept.note(result(), "lab", Tags())
    clock.now += 200
    assert (kept.calls_per_s(), kept.tenants(), kept.latency_ms()["total"].p50) == (0, [], 0)
