"""The job queue between gateways and workers: its envelopes and the rules every implementation keeps.

  Own        The gateway that accepted a call keeps its bytes until the answer; only it publishes the call again.
  Take       A worker takes as many jobs as it has free slots, never more.
  Lease      A worker renews what it runs every `RENEW_S`; what was not renewed for `LEASE_S` is handed to another worker.
             `Job.deliveries` counts; the worker that gets a job for the `MAX_STARTS + 1`-th time answers `worker_lost`.
  Answer     Publishing the answer and ending the lease are one step; an answer to a job that is no longer leased to
             anybody is still delivered, and the gateway drops all but the first answer of an id.
  Time       Messages carry what remains of a deadline, counted on the taker's monotonic clock from receipt;
             no two hosts' clocks are compared.

Ids are made by the gateway; a caller's own `Call.id` is a label that never comes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct, field

RENEW_S = 2.0
LEASE_S = 6.0


class Job(Struct, frozen=True):
    """One call on its way to a worker. `payload` is a packed `Call`, passed on without decoding."""

    id: str
    payload: bytes
    remaining_ms: int
    reply_to: str
    needs: str = "python"
    deliveries: int = 1


class Answer(Struct, frozen=True):
    """One result on its way back. `stay_ms`: from the worker's receipt of the job to this answer."""

    id: str
    payload: bytes
    stay_ms: float = 0.0


class WorkerInfo(Struct, frozen=True):
    """What a worker says of itself, renewed every `RENEW_S` and forgotten after `LEASE_S`."""

    id: str
    slots: int
    busy: int = 0
    needs: list[str] = field(default_factory=lambda: ["python"])
    tier: str = "none"
    layers: list[str] = []
    profiles: list[str] = []
    missing_layers: list[str] = []  # that this worker could have and has not


class GatewayQueue(Protocol):
    """The gateway's end."""

    name: str  # what its jobs carry as `reply_to`

    async def publish(self, jobs: Sequence[Job]) -> None:
        """Hand jobs to the workers. Returns when the queue has them."""

    async def receive(self) -> list[Answer]:
        """Wait for at least one answer addressed to this gateway, then give all that are there."""

    async def cancel(self, ids: Sequence[str]) -> list[str]:
        """Have these jobs forgotten or killed. Gives those that are known to be with no worker: they will not be answered."""

    async def workers(self) -> list[WorkerInfo]:
        """The workers that are alive."""


class WorkerQueue(Protocol):
    """The worker's end."""

    async def announce(self, info: WorkerInfo) -> None:
        """Be seen for the next `LEASE_S`."""

    async def take(self, most: int) -> list[Job]:
        """Wait for at least one job, then take up to `most`; each is leased to this worker."""

    async def renew(self, ids: Sequence[str]) -> None:
        """Keep the leases of `ids`, which are all that this worker is still running."""

    async def answer(self, answers: Sequence[Answer]) -> None:
        """Publish answers and end their leases."""

    async def cancelled(self) -> list[str]:
        """Wait for at least one cancellation, then give all that are there."""

    async def leave(self) -> None:
        """Be gone at once: jobs still leased are handed to another worker, no further ones come."""
