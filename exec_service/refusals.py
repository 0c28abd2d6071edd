"""Reasons to refuse a request. Each carries the stable code of `exec_wire.problems`; each protocol maps it once.

Refusal           any code
├── Overloaded    the admission limit is reached; says when to try again
└── NotPermitted  the caller's key does not allow this; names the call and the field
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


class NotPermitted(Refusal):
    """`inside`: the path of the field in the call, from which the endpoint makes its path in the request."""

    def __init__(self, code: str, detail: str, inside: str) -> None:
        super().__init__(code, detail, field=f"${inside}")
        self.inside = inside
