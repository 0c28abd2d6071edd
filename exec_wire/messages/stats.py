"""The bodies of `GET /v1/info`, `GET /v1/stats` and `GET /v1/stats?run=…`: what a caller can rely on, what a gateway has seen.

Every field has a default, so that a client understands services older and newer than itself.
"""

from msgspec import Struct


class LimitValues(Struct, frozen=True):
    """Of every limit that a call can set: what it is if not given, and the most it can be."""

    default: dict[str, float] = {}
    maximum: dict[str, float] = {}


class RequestLimits(Struct, frozen=True):
    """What one request may hold, and all requests together."""

    max_calls_per_request: int = 0
    max_body_bytes: int = 0
    max_calls: int = 0
    max_bytes: int = 0


class WorkerSummary(Struct, frozen=True):
    """One live worker."""

    id: str = ""
    slots: int = 0
    busy: int = 0
    tier: str = "none"
    profiles: list[str] = []


class Info(Struct, frozen=True):
    """Version, isolation, capacity and limits of the service."""

    version: str = ""
    tier: str = "none"  # what every call gets at least
    layers: list[str] = []
    slots: int = 0
    workers: int = 0
    profiles: list[str] = []
    languages: list[str] = []
    limits: LimitValues = LimitValues()
    requests: RequestLimits = RequestLimits()
    worker_list: list[WorkerSummary] = []


class Quantiles(Struct, frozen=True):
    """Of times in milliseconds, right to a twentieth of their value; all 0 if there was nothing."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0


class Depths(Struct, frozen=True):
    """What is inside now."""

    in_flight: int = 0  # accepted and not yet delivered
    waiting: int = 0  # of these, in the gateway for want of a slot
    released: int = 0  # with the workers
    oldest_wait_s: float = 0.0
    slots: int = 0
    busy: int = 0


class SecondStats(Struct, frozen=True):
    """What was answered in one second, by blame."""

    none: int = 0
    model: int = 0
    infra: int = 0
    client: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class TenantShare(Struct, frozen=True):
    """What one tenant got in the window."""

    tenant: str = ""
    calls: int = 0
    slot_s: float = 0.0
    share: float = 0.0  # of the slots' time that all tenants had


class Failure(Struct, frozen=True):
    """A call that did not end well. Neither its code nor its output is kept."""

    seconds_ago: float = 0.0
    status: str = ""
    blame: str = ""
    error: str = ""
    exit_code: int | None = None
    signal: int | None = None
    total_ms: float = 0.0
    run: str = ""
    step: int | None = None
    tenant: str = ""
    worker: str = ""
    request_id: str = ""


class RunSummary(Struct, frozen=True):
    """One of the training runs that were seen last."""

    run: str = ""
    tenant: str = ""
    calls: int = 0
    tool_error_rate: float = 0.0  # blame model
    infra_fault_rate: float = 0.0  # blame infra
    last_step: int | None = None
    seconds_ago: float = 0.0


class Stats(Struct, frozen=True):
    """`GET /v1/stats`: the last seconds of this gateway."""

    uptime_s: float = 0.0
    window_s: float = 0.0  # what rates, latencies and shares below are of
    calls_per_s: float = 0.0
    now: Depths = Depths()
    latency_ms: dict[str, Quantiles] = {}  # by stage: queue, start, run, total
    seconds: list[SecondStats] = []  # the last whole ones, oldest first
    workers: list[WorkerSummary] = []
    tiers: dict[str, int] = {}  # workers by tier
    tenants: list[TenantShare] = []
    failures: list[Failure] = []  # newest first
    runs: list[RunSummary] = []  # last seen first


class StepStats(Struct, frozen=True):
    """The calls of one step of a run, as far as they are answered."""

    step: int | None = None
    calls: int = 0
    statuses: dict[str, int] = {}
    blames: dict[str, int] = {}
    tool_error_rate: float = 0.0
    infra_fault_rate: float = 0.0
    queue_ms: Quantiles = Quantiles()
    total_ms: Quantiles = Quantiles()
    slot_s: float = 0.0


class RunStats(Struct, frozen=True):
    """`GET /v1/stats?run=…`: the last steps of a run, in the order in which they began; none if nothing is known of it."""

    run: str = ""
    tenant: str = ""
    calls: int = 0
    steps: list[StepStats] = []
