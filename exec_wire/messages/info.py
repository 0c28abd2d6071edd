"""The body of `GET /v1/info`: what a caller can rely on here.

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
