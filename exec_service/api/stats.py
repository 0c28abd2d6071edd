"""`GET /v1/stats`: figures of the last seconds for the live view; `?run=…`: a training run by its steps, for trainers."""

from collections import Counter
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from exec_service.api.info import worker_summaries
from exec_service.api.middleware import RequestFacts
from exec_service.api.responses import answers, query_parameters, schema_of
from exec_service.api.validation import read_query
from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.workers import WorkerRegistry
from exec_service.refusals import Refusal
from exec_service.sessions import permitted
from exec_service.telemetry.metrics import CONTENT_TYPE, Metrics
from exec_service.telemetry.processes import NO_STATS, Question, Report, Reporter
from exec_wire.messages.calls import GivenLabel, Label, encode_json
from exec_wire.messages.stats import Depths, RunStats, Stats

OPERATORS_ONLY = "the metrics show all tenants; use a key made by `exec-service keys add --operator`, or the metrics port"


class StatsQuery(Struct, frozen=True, kw_only=True):
    """Without `tenant`, and without keys or with an operator's key: figures of all tenants, and of a `run` those of calls
    without a tenant."""

    run: GivenLabel | UnsetType = UNSET
    tenant: Label | UnsetType = UNSET


def stats_routes(worker_registry: WorkerRegistry, metrics: Metrics, report: Reporter, *, cluster: bool) -> APIRouter:
    """`report`: of all processes of this gateway. The metrics of a gateway of a cluster are at a port of their own."""
    router = APIRouter()

    @router.get(
        "/v1/stats",
        summary="Figures of the last seconds; with run those of a training run, by step",
        responses=_answers(),
        openapi_extra={"parameters": query_parameters(StatsQuery)},
    )
    async def stats(request: Request) -> Response:
        query = read_query(request.scope["query_string"], StatsQuery)
        tenant = _tenant_of(query, request)
        found: Stats | RunStats
        if query.run is UNSET:
            found = stats_of(await report(Question("stats")), worker_registry, tenant)
        else:
            found = (await report(Question("run", (tenant or "", query.run)))).live_stats.run(query.run, tenant or "")
        return Response(encode_json(found), media_type="application/json", headers={"cache-control": "no-store"})

    if not cluster:
        described = answers(Stats, "unauthenticated", "operators_only") | {200: {"content": {"text/plain": {}}}}

        @router.get("/metrics", summary="Prometheus metrics", responses=described)
        async def metrics_page(request: Request) -> Response:
            if not request.scope["exec"].sees_all:
                raise Refusal("operators_only", OPERATORS_ONLY)
            return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    return router


def report_of(dispatch: Dispatch, worker_registry: WorkerRegistry, metrics: Metrics, question: Question) -> Report:
    """The figures of this process."""
    about, live_stats = question.about, metrics.live_stats
    try:
        dispatch.check_ready()
        not_ready_because = ""
    except Refusal as refusal:
        not_ready_because = str(refusal)
    depths = Depths(
        in_flight=dispatch.admission.calls,
        waiting=len(dispatch.waiting),
        released=len(dispatch.released),
        oldest_wait_s=round(dispatch.oldest_wait_s, 3),
        slots=worker_registry.slots,
        busy=sum(worker.busy for worker in worker_registry.workers),
    )
    page = metrics.text().decode() if about == "metrics" else ""
    stats = {"stats": None, "run": question.run}
    return Report(page, not_ready_because, live_stats.part(stats[about]) if about in stats else NO_STATS, depths)


def stats_of(report: Report, worker_registry: WorkerRegistry, tenant: str | None) -> Stats:
    """`tenant`: whose shares, failures and runs; None for all tenants."""
    live_stats = report.live_stats
    return Stats(
        uptime_s=live_stats.uptime_s,
        window_s=live_stats.window_s,
        calls_per_s=live_stats.calls_per_s(),
        now=report.depths,
        latency_ms=live_stats.latency_ms(),
        seconds=live_stats.seconds(),
        workers=worker_summaries(worker_registry),
        tiers=dict(Counter(worker.tier for worker in worker_registry.workers)),
        tenants=live_stats.tenants(tenant),
        failures=live_stats.failures(tenant),
        runs=live_stats.runs(tenant),
    )


def _tenant_of(query: StatsQuery, request: Request) -> str | None:
    """Whose figures to show: with a key those of its tenant, unless it is an operator's key."""
    facts: RequestFacts = request.scope["exec"]
    account = facts.origin.account
    if account is None or facts.sees_all:
        return None if query.tenant is UNSET else query.tenant
    if query.tenant is not UNSET:
        with permitted(""):
            account.check_tenant(query.tenant)
    return account.tenant


def _answers() -> dict[int | str, dict[str, Any]]:
    responses = answers(Stats, "bad_query", "unauthenticated", "foreign_tenant")
    responses[200]["description"] = "Stats; with run a RunStats"
    responses[200]["content"]["application/json"]["schema"] = {"anyOf": [schema_of(Stats), schema_of(RunStats)]}
    return responses
