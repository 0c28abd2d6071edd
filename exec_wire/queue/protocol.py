"""The job queue between gateways and workers: its envelopes and the rules every implementation keeps.

  Own        The gateway that accepted a call keeps its bytes until the answer; only it publishes the call again.
  Take       A worker takes as many jobs as it has free slots, and only of the classes that it can run. It may hold more, at
             most one per slot: those that start within milliseconds at the rate of its programs, and as many as cells of its
             sessions wait for a slot. It does not wait for jobs to hold.
  Hold       A held job waits at a worker for a slot. It is renewed, expires, and is cancelled like one that runs; that time is
             not part of `Answer.stay_ms`. A worker that cannot start it soon, or drains, hands it back: it keeps its place in
             the queue, and a worker that waits for jobs gets it at once.
  Lease      A worker renews what it has every `RENEW_S`; what was not renewed for `LEASE_S` is handed to another worker.
  Starts     `Job.deliveries` counts starts, with the one to come. A take counts the jobs that it takes for free slots. A held
             job is counted when it starts (`started`); only the first take of a job may count it although it is held. So a
             job that kills its workers is answered `worker_lost` by the worker that would start it for the
             `MAX_STARTS + 1`-th time, and a job that was only held never is.
  Answer     Publishing the answer, ending the lease and keeping the record are one step; an answer to a job that is no longer
             leased to anybody is still delivered, and the gateway drops all but the first answer of an id.
  Reconcile  A gateway looks for jobs that it published more than `RECONCILE_S` ago (`missing`) and publishes those
             that are gone again. After the queue has `forgotten`, it looks for jobs that are `FORGOTTEN_S` old.
  Cancel     A cancel may reach a worker before the job does, and may name jobs of other workers: a worker remembers it for a
             while (`exec_wire.queue.early_cancels`). A job that was cancelled is never published again.
  Directed   A job for one worker is delivered to it at most once and never to another: it has no lease. If that worker is gone
             before it answered, the outcome of the job is unknown.
  Shards     A queue may be several servers. A job with a record goes to the server that the record's name chooses, any other to
             one with a live worker of its class. A job that may have been published stays with its server, and so do all
             jobs of a session. A server that cannot be used delays its own jobs alone.
  Time       Messages carry what remains of a deadline, counted on the taker's monotonic clock from receipt;
             no two hosts' clocks are compared.
  Unreadable A job whose contents cannot be read is handed out with an empty payload, which the worker answers
             `internal_error`. A job of a newer `WIRE_VERSION` is left to workers that can read it; one for a single worker is
             answered by it. An entry without a gateway to answer is removed and counted. None of these stops a reader.

Ids are made by the gateway; a caller's own `Call.id` is a label that never comes here.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, NamedTuple, Protocol, get_args

from msgspec import Meta, Struct, field

from exec_wire.messages.calls import Selection, Tier

RENEW_S = 2.0
LEASE_S = 6.0
RECONCILE_S = 12.0
FORGOTTEN_S = 2.0  # most running calls are answered within this time, and are not lost although the queue has forgotten them
RECORD_S = 120  # how long a result is kept for calls with the same idempotency key

WIRE_VERSION = 1  # of `Job` and `Answer`; a change that the readers of today misunderstand gets the next number

PRIORITY_WEIGHTS: dict[str, float] = {"train": 16.0, "eval": 4.0, "bulk": 1.0}  # their shares while several wait

TIERS: tuple[str, ...] = get_args(Tier)  # strongest first


class QueueUnavailable(Exception):
    """The queue cannot be used now; a retry may help. `sent`: the queue may have executed the command all the same."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(f"job queue unavailable: {why}")
        self.sent = sent


class ShardsUnavailable(QueueUnavailable):
    """Some servers of the queue cannot be used now. `failed`: the ids of the jobs that were for them, and whether each may have
    been published all the same. The others are published."""

    def __init__(self, why: str, failed: Mapping[str, bool]) -> None:
        super().__init__(why, sent=any(failed.values()))
        self.failed = failed


class Job(Struct, frozen=True, array_like=True):
    """One call on its way to a worker. `payload` is a packed `Call`, passed on without decoding."""

    id: str
    payload: bytes
    remaining_ms: int
    reply_to: str
    needs: str = "python"  # a class, see `class_of`
    deliveries: int = 1  # how often it was started, with the start to come
    record_as: str = ""  # where a result that is not our fault is kept for other gateways; nowhere if empty
    waited_ms: int = 0  # since the gateway accepted it
    weight: Annotated[float, Meta(gt=0)] = 1.0  # of its tenant


class Answer(Struct, frozen=True, array_like=True):
    """One result on its way back. `stay_ms`: from when the worker had a slot for the job to this answer."""

    id: str
    payload: bytes
    stay_ms: float = 0.0
    record: bool = False  # may be kept, if the job says where


class WorkerInfo(Struct, frozen=True):
    """The heartbeat of a worker, renewed every `RENEW_S`; it expires after `LEASE_S`."""

    id: str
    slots: Annotated[int, Meta(ge=0)]  # none while it cannot take jobs
    busy: int = 0
    needs: list[str] = field(default_factory=lambda: ["python"])  # languages
    tier: str = "none"
    layers: list[str] = []
    profiles: list[str] = []
    missing_layers: list[str] = []  # that this worker could have and has not
    sessions: int = 0
    max_sessions: int = 0
    session_memory_bytes: int = 0
    session_counts: dict[str, int] = {}  # since its start: started, forks, rollbacks, expired, lost
    shards: list[str] = []  # the servers that it takes jobs from, by name, if there are several
    holds: Annotated[int, Meta(ge=0)] = 0  # how many jobs it would hold now

    @property
    def classes(self) -> list[str]:
        """The jobs that it can run: every language, with every tier that it is as strong as."""
        tiers = TIERS[TIERS.index(self.tier) : -1] if self.tier in TIERS else ()
        return [class_of(language, tier) for tier in ("", *tiers) for language in self.needs]


class TenantUse(Struct, frozen=True, array_like=True):
    """What a tenant uses of its limits at one gateway."""

    calls: int = 0  # in flight
    spent: float = 0.0  # of its calls per minute; falls as the minute refills
    wants: bool = False  # it was refused lately


class GatewayInfo(Struct, frozen=True):
    """The heartbeat of a gateway, renewed about every second; it expires after `LEASE_S`."""

    id: str
    backlog: bool = False  # calls wait there
    tenants: dict[str, TenantUse] = {}  # those that have limits and use some
    shards: list[str] = []  # the servers that it publishes jobs on, by name, if there are several


class Ask(Struct, frozen=True, array_like=True):
    """One gateway asks the others to cancel what they have of a selection."""

    asker: str
    id: str
    selection: Selection


def class_of(language: str, require_tier: str = "") -> str:
    """What a worker must have to run a job."""
    return f"{language}@{require_tier}" if require_tier else language


def fingerprint(payload: bytes) -> bytes:
    """Of a packed call: two calls with the same one are the same program."""
    return hashlib.blake2b(payload, digest_size=16).digest()


def record_name(tenant: str, key: str) -> str:
    """A digest: of fixed length, whatever callers choose, and no pair of tenant and key is taken for another one."""
    return hashlib.blake2b(f"{len(tenant)}:{tenant}{key}".encode(), digest_size=16).hexdigest()


NO_USE: Mapping[str, TenantUse] = MappingProxyType({})


class ShardState(NamedTuple):
    available: bool
    unanswered: int  # jobs that were published there


class Shards(Protocol):
    """What a gateway asks of a queue that is several servers, before it publishes a job there."""

    @property
    def stranded(self) -> Counter[str]:
        """Unanswered jobs by class whose shard is not open for it: they use no credit, for no worker has them."""

    def shard_of(self, id: str, record_as: str) -> str:
        """The shard that a job has to go to: that of its record, or where it may be already. Empty: any."""

    def is_open(self, shard: str, needs: str) -> bool:
        """Whether the shard, or any if it is empty, can be used and has a live worker of the class."""

    @property
    def states(self) -> dict[str, ShardState]:
        """By name."""


class GatewayQueue(Protocol):
    """The gateway's end."""

    name: str  # what its jobs carry as `reply_to`
    shared: bool  # other gateways may use the same queue
    unreadable: Counter[str]  # answers, heartbeats and asks that could not be read, by kind

    @property
    def forgotten(self) -> int:
        """How often the queue lost its data: a restart without persistence, a flush, an eviction."""

    @property
    def shards(self) -> Shards | None:
        """None if the queue is not several servers."""

    async def announce(self, backlog: bool, tenants: Mapping[str, TenantUse] = NO_USE) -> list[GatewayInfo]:
        """Send a heartbeat. Returns the other live gateways."""

    async def publish(self, jobs: Sequence[Job]) -> None:
        """Hand jobs to the workers: all of them or none, or of several servers `ShardsUnavailable`. Returns when the queue has
        them."""

    async def publish_to(self, worker: str, job: Job, pin: str = "") -> None:
        """Hand a job to one worker. If that worker is gone, the job is lost. Jobs with the same `pin` reach it in order."""

    async def receive(self) -> list[Answer]:
        """Wait for at least one answer addressed to this gateway, then return all that have arrived."""

    async def cancel(self, ids: Sequence[str]) -> list[str]:
        """Delete these jobs, or have their workers kill them. Returns those that no worker has taken: they get no answer."""

    async def missing(self, ids: Sequence[str]) -> list[str]:
        """Those of these published jobs that the queue no longer has: answered, or lost."""

    async def workers(self) -> list[WorkerInfo]:
        """The workers that are alive."""

    async def recorded(self, names: Sequence[str]) -> list[bytes | None]:
        """The record under each name: the fingerprint of the call, then its result as the worker packed it."""

    async def ask_others(self, selection: Selection) -> int:
        """Have the other gateways cancel their calls of this selection. Returns the number of these calls."""

    async def asked(self) -> list[Ask]:
        """Wait for at least one ask of another gateway, then return all that have arrived."""

    async def tell(self, ask: Ask, cancelled: int) -> None:
        """Answer an ask."""

    async def leave(self) -> None:
        """Deregister and close all connections."""


class WorkerQueue(Protocol):
    """The worker's end."""

    unreadable: Counter[str]  # entries that could not be read, by kind

    @property
    def stranded(self) -> int:
        """How many answers could not be sent, although other servers of the queue can be used."""

    @property
    def states(self) -> Mapping[str, bool]:
        """Which of several servers can be used, by name."""

    async def announce(self, info: WorkerInfo) -> None:
        """Send a heartbeat, and take jobs of `info.classes` from now on."""

    async def take(self, most: int, *, hold: int = 0, wait: bool = True) -> list[Job]:
        """Wait for at least one job, then take up to `most` that start now and up to `hold` after them; each is leased to this
        worker. Without `wait`: those there now.

        A worker may get a job that it still runs: if it did not renew it in time, or if it was published twice.
        """

    async def started(self, ids: Sequence[str]) -> None:
        """Count the start of these jobs, which were held, unless their take has counted it. They start when this returns."""

    async def hand_back(self, ids: Sequence[str]) -> list[str]:
        """Have others run these jobs, which were held and not started. Returns those that were handed back: a job whose lease
        was lost, or that was cancelled, is not."""

    async def take_directed(self) -> list[Job]:
        """Wait for at least one job directed to this worker, then take all that have arrived."""

    async def renew(self, ids: Sequence[str]) -> None:
        """Keep the leases of `ids`, which are all that this worker is still running."""

    async def answer(self, answers: Sequence[Answer]) -> None:
        """Publish answers and end their leases."""

    async def cancelled(self) -> list[str]:
        """Wait for at least one cancellation, then return all that have arrived: also of jobs of other workers and of jobs that
        reach this worker later. While this is awaited, a waiting `take` also hears of jobs that were handed back."""

    async def leave(self) -> None:
        """Deregister: leased jobs go to other workers, no further ones come."""
