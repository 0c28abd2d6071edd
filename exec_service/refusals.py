"""Why a request is not accepted. Each carries the stable code of `exec_wire.problems`; every door maps it once.

Refusal                  any code; raised by decoding and validation
├── Overloaded           the admission limit is reached; says when to come again
├── Draining             shutting down
├── NotReady             nothing can be run here; says why
├── IdempotencyConflict  the key is in use with another payload; says which call
└── NotPermitted         the caller's key does not allow this; says which call and what of it
"""

from __future__ import annotations


class Refusal(Exception):
    def __init__(self, code: str, detail: str = "", *, field: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.field = field
        self.retry_after_s = retry_after_s


class Overloaded(Refusal):
    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__("overloaded", detail, retry_after_s=retry_after_s)


class Draining(Refusal):
    def __init__(self, why: str = "") -> None:
        super().__init__("draining", "the service finishes what it has and takes nothing new" + (f": {why}" if why else ""))


class NotReady(Refusal):
    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__("not_ready", why, retry_after_s=retry_after_s)


class IdempotencyConflict(Refusal):
    """`index` is the position of the offending call, `inside` the path in it; a door turns both into the path of a field."""

    def __init__(self, index: int) -> None:
        super().__init__("idempotency_conflict", "the key was used for a call with other contents")
        self.index, self.inside = index, ".idempotency_key"


class NotPermitted(Refusal):
    """`index` and `inside` as above."""

    def __init__(self, code: str, detail: str, index: int, inside: str) -> None:
        super().__init__(code, detail, field=f"${inside}")
        self.index, self.inside = index, inside
