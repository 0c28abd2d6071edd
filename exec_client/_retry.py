"""When a request is sent again: the policy, and the loop for requests that are not calls (`_outbox` retries those)."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import Struct

from exec_client.errors import DeadlineExceeded, ExecError, NotReady, Overloaded, ProtocolError, SessionLost, Unavailable

T = TypeVar("T")


class Policy(Struct, frozen=True, kw_only=True):
    """How requests are formed and retried. The defaults suit one gateway and anything from one call to 45,000 in flight."""

    max_attempts: int = 5  # sends of one call that may have been accepted, and connects to a service that never answered yet
    backoff_s: float = 0.1  # first pause; doubles each time, jittered
    max_backoff_s: float = 5.0
    grace_s: float = 2.5  # after a call's deadline, for the service's own result, which may take 2 s, to arrive
    connections: int = 8  # requests that open freely
    max_connections: int = 64  # requests open at once when they are long-lived or full
    grow_after_s: float = 0.02
    calls_per_request: int = 256
    max_calls_per_request: int = 4096  # the service takes no more
    max_request_bytes: int = 16 << 20  # the service takes 64 MB

    def pause_s(self, nth: int) -> float:
        """Before the nth retry, counted from 1."""
        longest = min(self.max_backoff_s, self.backoff_s * 2.0 ** min(nth - 1, 30))
        return longest * random.uniform(0.5, 1.0)


async def send_until_answered(send: Callable[[float], Awaitable[T]], policy: Policy, deadline_s: float) -> T:
    """Retry an idempotent request; `send` gets the time left. Refusals do not count as attempts: nothing was accepted."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    attempts, refusals = 0, 0
    last: ExecError = DeadlineExceeded("the deadline passed before this could be sent")
    while (left_s := deadline - loop.time()) > 0:
        try:
            return await send(left_s)
        except SessionLost:
            raise
        except (Overloaded, NotReady) as error:
            refusals += 1
            last, pause_s = error, error.retry_after_s or policy.pause_s(refusals)
        except (Unavailable, ProtocolError) as error:
            attempts += 1
            last, pause_s = error, policy.pause_s(attempts)
            if attempts >= policy.max_attempts or not getattr(error, "retryable", True):
                raise
        if loop.time() + pause_s >= deadline:
            break
        await asyncio.sleep(pause_s)
    raise last
