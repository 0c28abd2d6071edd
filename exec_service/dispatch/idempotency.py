"""Calls with the same key run once: they join the running job, or get the recorded result.

Records live in this gateway's memory for a while and within a byte budget, oldest out first. Only results whose blame is not
infra are recorded, so that a call that we failed runs again. Records of other gateways are adopted when a call needs them.
"""

from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct

from exec_service.dispatch.tickets import Key, PendingJob
from exec_wire.messages.calls import Blame
from exec_wire.queue.protocol import fingerprint

RECORD_OVERHEAD_BYTES = 512  # of a record besides its payload


class PayloadDiffers(Exception):
    """The key is known, with other contents."""


class Record(Struct, frozen=True):
    """A finished result, packed as the worker sent it."""

    fingerprint: bytes
    payload: bytes
    ends_at: float

    @property
    def bytes(self) -> int:
        return len(self.payload) + RECORD_OVERHEAD_BYTES


class Idempotency:
    def __init__(self, ttl_s: float, max_bytes: int, clock: Callable[[], float]) -> None:
        self._ttl_s, self._max_bytes, self._clock = ttl_s, max_bytes, clock
        self._running: dict[Key, PendingJob] = {}
        self._records: OrderedDict[Key, Record] = OrderedDict()  # by time of finishing, which is also the order of lapsing
        self._bytes = 0

    def find(self, key: Key, payload: bytes) -> PendingJob | Record | None:
        """The job or record of this key; raises `PayloadDiffers` if it belongs to another program."""
        running = self._running.get(key)
        if running is not None:
            if running.payload != payload:
                raise PayloadDiffers
            return running
        self._forget_lapsed()
        record = self._records.get(key)
        if record is not None and record.fingerprint != fingerprint(payload):
            raise PayloadDiffers
        return record

    def knows(self, key: Key) -> bool:
        self._forget_lapsed()
        return key in self._running or key in self._records

    def adopt(self, key: Key, fingerprint: bytes, result_payload: bytes) -> None:
        """Keep a record of another gateway."""
        if not self.knows(key):
            self._keep(key, Record(fingerprint, result_payload, self._clock() + self._ttl_s))

    def start(self, job: PendingJob) -> None:
        if job.key is not None:
            self._running[job.key] = job

    def stop(self, job: PendingJob) -> None:
        """The job ends without a result: the next call with this key runs."""
        if job.key is not None and self._running.get(job.key) is job:
            del self._running[job.key]

    def finish(self, job: PendingJob, result_payload: bytes, blame: Blame) -> None:
        self.stop(job)
        if job.key is None or blame == "infra":
            return
        self._keep(job.key, Record(fingerprint(job.payload), result_payload, self._clock() + self._ttl_s))

    def _keep(self, key: Key, record: Record) -> None:
        if record.bytes > self._max_bytes:
            return
        self._records[key] = record
        self._bytes += record.bytes
        self._forget_lapsed()
        while self._bytes > self._max_bytes:
            self._forget_oldest()

    def _forget_lapsed(self) -> None:
        now = self._clock()
        while self._records and next(iter(self._records.values())).ends_at <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, record = self._records.popitem(last=False)
        self._bytes -= record.bytes
