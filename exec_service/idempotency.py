"""The same key runs once: joins what is running, repeats what has finished.

Records live in this gateway's memory for a while and within a byte budget, oldest out first. Only results whose blame
is not infra are recorded, so that what we did wrong is tried again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct

from exec_service.flight import Flight, Key
from exec_wire.messages import Blame

RECORD_OVERHEAD_BYTES = 512  # what a record costs besides its payload


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


def fingerprint(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


class Idempotency:
    def __init__(self, ttl_s: float, max_bytes: int, clock: Callable[[], float]) -> None:
        self._ttl_s, self._max_bytes, self._clock = ttl_s, max_bytes, clock
        self._running: dict[Key, Flight] = {}
        self._records: OrderedDict[Key, Record] = OrderedDict()  # by time of finishing, which is also the order of lapsing
        self._bytes = 0

    def find(self, key: Key, payload: bytes) -> Flight | Record | None:
        """What this key stands for; raises `PayloadDiffers` if it stands for something else."""
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

    def start(self, flight: Flight) -> None:
        if flight.key is not None:
            self._running[flight.key] = flight

    def stop(self, flight: Flight) -> None:
        """Without a result: the next call with this key runs."""
        if flight.key is not None and self._running.get(flight.key) is flight:
            del self._running[flight.key]

    def finish(self, flight: Flight, result_payload: bytes, blame: Blame) -> None:
        self.stop(flight)
        if flight.key is None or blame == "infra":
            return
        record = Record(fingerprint(flight.payload), result_payload, self._clock() + self._ttl_s)
        if record.bytes > self._max_bytes:
            return
        self._records[flight.key] = record
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
