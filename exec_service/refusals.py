"""Reasons to refuse a request. Each carries the stable code of `exec_wire.problems`; each protocol maps it once.

Refusal                  any code; raised by decoding and validation
├── Overloaded           the admission limit is reached; says when to try again
├── Draining             shutting down
├── NotReady             no program can run here; says why
├── IdempotencyConflict  the key is in use with another payload; says which call
└── NotPermitted         the caller's key does not allow this; names the call and the field
"""


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
        super().__init__("draining", "the service finishes accepted calls and admits no new ones" + (f": {why}" if why else ""))


class NotReady(Refusal):
    def __init__(self, why: str, retry_after_s: float) -> None:
        super().__init__("not_ready", why, retry_after_s=retry_after_s)


class IdempotencyConflict(Refusal):
    """`index`: the position of the call; `inside`: the path in it. An endpoint makes the path of a field from both."""

    def __init__(self, index: int) -> None:
        super().__init__("idempotency_conflict", "the key was used for a call with another payload")
        self.index, self.inside = index, ".idempotency_key"


class NotPermitted(Refusal):
    def __init__(self, code: str, detail: str, index: int, inside: str) -> None:
        super().__init__(code, detail, field=f"${inside}")
        self.index, self.inside = index, inside
