"""Limits of one tenant and how much of them is in use: calls in flight, calls per minute, limits of its programs, priority.

Accounts exist only with keys (`tenants.keys`). About once a second gateways tell each other what tenants use of their limits. A
gateway grants what the others leave of a limit, and reserves an equal share for every gateway that had to refuse the tenant, so
that a tenant may use one gateway or all of them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from exec_service.dispatch.admission import InFlight
from exec_service.refusals import NotPermitted, Refusal
from exec_wire.messages.calls import Call, Limits, Priority, Selection
from exec_wire.queue.protocol import GatewayInfo, TenantUse

LimitName = Literal["wall_s", "cpu_s", "memory_mb", "output_kb", "processes", "file_mb"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # the most urgent first
MINUTE_S = 60.0
LATE_S = 3.0  # after `retry_after_s`, within which a refused caller tries again

M = TypeVar("M", bound=Struct)


class Allowance(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of a tenant in the key file. 0 means no limit of its own."""

    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # its share when several tenants wait
    max_calls: Annotated[int, Meta(ge=0)] = 0  # accepted and not yet delivered
    calls_per_minute: Annotated[int, Meta(ge=0)] = 0
    max_limits: dict[LimitName, Annotated[float, Meta(gt=0)]] = {}
    max_priority: Priority = "train"  # a call with a higher one gets this


class Account(InFlight):
    """Of one tenant, while the gateway runs; `allowance` changes with the key file."""

    def __init__(
        self,
        tenant: str,
        allowance: Allowance,
        retry_after_max_s: float = MINUTE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self.tenant, self.allowance = tenant, allowance
        self._retry_after_max_s = retry_after_max_s
        self._spent = 0.0  # calls of this minute; refills to 0 within a minute
        self._spent_at = clock()
        self._spending = 1  # gateways that accepted calls of the tenant in this minute
        self._wants_until = float("-inf")  # it was refused, and is expected to try again until then
        self._elsewhere = self._kept = TenantUse()  # use at other gateways; the same with reserves

    def check(self, calls: int) -> None:
        """Raise a `Refusal` if this many calls do not fit now, or never will."""
        self._check_in_flight(calls)
        self._check_minute(calls)

    def take_up(self, calls: int) -> None:
        """They were accepted: count them for this minute, and charge them."""
        self._refill()
        self._spent += calls
        self.charge(calls)

    def use(self) -> TenantUse | None:
        """What this gateway tells the others; None if nothing is in use."""
        self._refill()
        use = TenantUse(self.calls, round(self._spent, 3), self._clock() < self._wants_until)
        limited = self.allowance.max_calls or self.allowance.calls_per_minute
        return use if limited and use != TenantUse() else None

    def learn(self, others: Sequence[GatewayInfo]) -> None:
        """Take over what the other gateways tell."""
        self._refill()
        uses = [use for other in others if (use := other.tenants.get(self.tenant)) is not None]
        calls, minute = (most / (1 + len(uses)) for most in (self.allowance.max_calls, self.allowance.calls_per_minute))
        self._spending = 1 + sum(use.spent > 0 for use in uses)
        self._elsewhere = TenantUse(sum(use.calls for use in uses), sum(use.spent for use in uses))
        self._kept = TenantUse(
            sum(max(use.calls, int(calls) if use.wants else 0) for use in uses),
            sum(max(use.spent, minute if use.wants else 0.0) for use in uses),
        )

    def _check_in_flight(self, calls: int) -> None:
        most = self.allowance.max_calls
        # A tenant without calls here is not held to the reserves: two large requests would block each other for ever.
        elsewhere = (self._kept if self.calls else self._elsewhere).calls
        over = self.calls + elsewhere + calls - most
        if not most or over <= 0:
            return
        self._fits_at_all(calls, most, "in flight")
        per_s, _ = self.per_s()
        wait_s = min(self._retry_after_max_s, max(1.0, over / per_s if per_s else self._retry_after_max_s))
        more = f", and {elsewhere} at other gateways or reserved for them" if elsewhere else ""
        detail = f"this key may have {most} calls in flight; it has {self.calls}{more}; {calls} more do not fit"
        raise self._refuse("tenant_busy", detail, wait_s)

    def _check_minute(self, calls: int) -> None:
        most = self.allowance.calls_per_minute
        if not most:
            return
        self._fits_at_all(calls, most, "per minute")
        self._refill()
        left = most - self._spent - (self._kept if self._spent else self._elsewhere).spent
        if calls > left:
            detail = f"this key may make {most} calls per minute; {max(0, int(left))} are left now"
            raise self._refuse("rate_limited", detail, (calls - left) * MINUTE_S / most + 0.05)

    def _refuse(self, code: str, detail: str, wait_s: float) -> Refusal:
        self._wants_until = self._clock() + wait_s + LATE_S
        return Refusal(code, detail, retry_after_s=round(wait_s, 1))

    def _fits_at_all(self, calls: int, most: int, what: str) -> None:
        if calls > most:
            raise Refusal("too_many_calls", f"{calls} calls in one request; this key may have {most} {what}", field="$.calls")

    def _refill(self) -> None:
        """All gateways together refill the minute once, so each refills its part."""
        most, now = self.allowance.calls_per_minute, self._clock()
        refilled = (now - self._spent_at) * most / MINUTE_S / self._spending
        self._spent = max(0.0, min(self._spent, float(most)) - refilled)
        self._spent_at = now

    def change(self, allowance: Allowance) -> None:
        self._refill()
        self.allowance = allowance

    def permit(self, call: Call) -> Call:
        """The call as one of this tenant. Raises `NotPermitted` with the field that is not allowed."""
        self.check_tenant(call.tenant)
        limits = self.permit_limits(call.limits)
        return self.own(call if limits is call.limits else msgspec.structs.replace(call, limits=limits))

    def own(self, message: M) -> M:
        """Set tenant and priority of a message of this request. In place: copying each call would cost more."""
        force_setattr(message, "tenant", self.tenant)
        priority = getattr(message, "priority", None)
        if priority is not None and self.allowance.max_priority != "train":
            force_setattr(message, "priority", max(priority, self.allowance.max_priority, key=PRIORITIES.index))
        return message

    def check_tenant(self, tenant: str) -> None:
        if tenant not in ("", self.tenant):
            raise NotPermitted("foreign_tenant", "this key belongs to another tenant", ".tenant")

    def permit_limits(self, limits: Limits, at: str = ".limits") -> Limits:
        """The given limits; a default CPU time, which follows from the wall time, is lowered to the key's."""
        self.check_limits(limits, at)
        return self.lowered_limits(limits) if limits.cpu_s is None and "cpu_s" in self.allowance.max_limits else limits

    def check_limits(self, limits: Limits, at: str = ".limits") -> None:
        for name in self.allowance.max_limits:
            if (value := getattr(limits, name)) is not None:
                self.check_limit(name, value, f"{at}.{name}")

    def check_limit(self, name: LimitName, value: float, inside: str) -> None:
        most = self.allowance.max_limits.get(name, value)
        if value > most:
            raise NotPermitted("beyond_limits", f"{name} is {value:g}; with this key at most {most:g}", inside)

    def lowered(self, call: Call) -> Call:
        """With every limit lowered to the key's."""
        limits = self.lowered_limits(call.limits)
        return call if limits is call.limits else msgspec.structs.replace(call, limits=limits)

    def lowered_limits(self, given: Limits) -> Limits:
        limits = msgspec.structs.asdict(given) | {"cpu_s": given.cpu_limit_s}
        most = {name: type(limits[name])(bound) for name, bound in self.allowance.max_limits.items() if limits[name] > bound}
        return Limits(**(limits | most)) if most else given

    def select(self, selection: Selection) -> Selection:
        self.check_tenant(selection.tenant)
        return self.own(selection)
