"""Everything the client raises.

```text
ExecError                 .index: position of the call in run_many / as_completed
 ├─ CallerError           .code .field .status: the call or the request is wrong; trying again cannot help
 │   ├─ BadRequest        a field is missing or wrong (found here before sending, or by the service)
 │   │   └─ UnknownArgument  also a TypeError: there is no such argument or field; the message suggests one
 │   ├─ Conflict          the idempotency key was used with another payload
 │   ├─ TooLarge          one call alone is larger than the service takes
 │   └─ Forbidden         this caller may not do this
 ├─ Unavailable           .result: the last Result, if there was one; no fault of the call: it may be tried again later
 │   ├─ Overloaded        .retry_after_s: refused until the deadline (429)
 │   ├─ NotReady          .retry_after_s: the service starts or drains (503)
 │   ├─ ConnectionFailed  .sent: False if no byte of the request can have arrived
 │   ├─ ServiceFailed     .status: 500, or a proxy's 502 and 504
 │   ├─ InfraFailure      .attempts: the machine, not the program, failed, more often than `max_attempts`
 │   ├─ SessionLost       the worker that had the session is gone, and the state with it
 │   └─ DeadlineExceeded  no answer within the call's `deadline_s`
 ├─ ProtocolError         the other side does not speak this protocol
 └─ UsageError            also a RuntimeError: the client object was used in a way that it cannot work
     ├─ ClientClosed      closed before the call was answered
     └─ WrongEventLoop    an AsyncClient belongs to the loop that first used it
```

What the user's program did is never here: it is the status of a normal `Result`.
All of these can be pickled and copied, so that they survive a trip out of a remote actor.
"""

from __future__ import annotations

from exec_wire import Result


class ExecError(Exception):
    index: int = 0


class CallerError(ExecError):
    def __init__(self, message: str = "", *, code: str = "", field: str = "", status: int = 0, request_id: str = "") -> None:
        super().__init__(message)
        self.code, self.field, self.status, self.request_id = code, field, status, request_id


class BadRequest(CallerError):
    pass


class UnknownArgument(BadRequest, TypeError):
    pass


class Conflict(CallerError):
    pass


class TooLarge(CallerError):
    pass


class Forbidden(CallerError):
    pass


class Unavailable(ExecError):
    def __init__(self, message: str = "", *, result: Result | None = None) -> None:
        super().__init__(message)
        self.result = result


class Overloaded(Unavailable):
    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(Unavailable):
    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConnectionFailed(Unavailable):
    def __init__(self, message: str = "", *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class ServiceFailed(Unavailable):
    def __init__(self, message: str = "", *, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class InfraFailure(Unavailable):
    """`attempts`: how often the call was sent. The rest is in `result`: status, error, worker, request_id."""

    def __init__(self, message: str = "", *, result: Result | None = None, attempts: int = 1) -> None:
        super().__init__(message, result=result)
        self.attempts = attempts

    @classmethod
    def of(cls, result: Result, attempts: int = 1) -> InfraFailure:
        where = f"worker {result.worker or 'unknown'}, request {result.request_id or 'unknown'}"
        tried = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        return cls(f"{result.status}: {result.error or 'no reason given'} ({tried}, {where})", result=result, attempts=attempts)


class SessionLost(Unavailable):
    pass


class DeadlineExceeded(Unavailable):
    pass


class ProtocolError(ExecError):
    """`retryable`: a damaged stream may be whole the next time; a wrong service stays wrong."""

    def __init__(self, message: str = "", *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class UsageError(ExecError, RuntimeError):
    pass


class ClientClosed(UsageError):
    pass


class WrongEventLoop(UsageError):
    pass
