"""What one tenant may have and what it has now: calls in flight, calls per minute, limits of its programs, priority.

There are accounts only where there are keys (`tenants.keys`). Gateways tell each other about every second what tenants use
of their limits. A gateway gives out what the others leave of a limit. It also leaves an equal part to every gateway that had to
refuse the tenant, so that a tenant may use one gateway or all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from exec_service.dispatch.admission import CompletionRate
from exec_service.refusals import NotPermitted, Refusal
from exec_wire.messages.calls import Call, Limits, Priority, Selection
from exec_wire.queue.protocol import GatewayInfo, TenantUse

LimitName = Literal["wall_s", "cpu_s", "memory_mb", "output_kb", "processes", "file_mb"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # the most urgent first
MINUTE_S = 60.0
LATE_S = 3.0  # after `retry_after_s`, in which whoever was refused comes again

M = TypeVar("M", bound=Struct)


class Allowance(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a tenant may have, as the file of keys says it. 0 stands for no limit of its own."""

    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # its share when several tenants wait
    max_calls: Annotated[int, Meta(ge=0)] = 0  # accepted and not yet delivered
    calls_per_minute: Annotated[int, Meta(ge=0)] = 0
    max_limits: dict[LimitName, Annotated[float, Meta(gt=0)]] = {}
    max_priority: Priority = "train"  # what asks for more is served with this


class Account:
    """One tenant's, for as long as the gateway lives; `allowance` changes when the file of keys does."""

    def __init__(
        self,
        tenant: str,
        allowance: Allowance,
        retry_after_max_s: float = MINUTE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tenant, self.allowance = tenant, allowance
        self.calls = 0  # in flight
        self._retry_after_max_s, self._clock = retry_after_max_s, clock
        self._rate = CompletionRate(clock)
        self._spent = 0.0  # of the calls per minute; falls to 0 within a minute
        self._spent_at = clock()
        self._spending = 1  # gateways at which the tenant has spent some of its minute
        self._wants_until = float("-inf")  # it was refused, and may come again by then
        self._elsewhere = self._kept = TenantUse()  # what is used at other gateways; the same with what is kept for them

    # -- how many ---------------------------------------------------------------------------------------------------------

    def check(self, calls: int) -> None:
        """Raise a `Refusal` if so many do not fit now, or never will."""
        self._check_in_flight(calls)
        self._check_minute(calls)

    def take_up(self, calls: int) -> None:
        """They were accepted: they count for this minute, and are charged."""
        self._refill()
        self._spent += calls
        self.charge(calls)

    def charge(self, calls: int) -> None:
        """They are in flight until `give_back`."""
        self.calls += calls

    def give_back(self, calls: int) -> None:
        self.calls -= calls
        self._rate.note(calls, 0)

    def give_back_unused(self, calls: int) -> None:
        """Of a reservation: nothing was completed."""
        self.calls -= calls

    def use(self) -> TenantUse | None:
        """For the other gateways; None if there is nothing to say."""
        self._refill()
        use = TenantUse(self.calls, round(self._spent, 3), self._clock() < self._wants_until)
        limited = self.allowance.max_calls or self.allowance.calls_per_minute
        return use if limited and use != TenantUse() else None

    def learn(self, others: Sequence[GatewayInfo]) -> None:
        """From the other gateways."""
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
        elsewhere = (self._kept if self.calls else self._elsewhere).calls  # else two large requests keep each other out
        over = self.calls + elsewhere + calls - most
        if not most or over <= 0:
            return
        self._fits_at_all(calls, most, "in flight")
        per_s, _ = self._rate.per_s()
        wait_s = min(self._retry_after_max_s, max(1.0, over / per_s if per_s else self._retry_after_max_s))
        words = f"{self.calls} of the {most} calls that this key may have in flight are"
        if elsewhere:
            words += f", {elsewhere} more are at other gateways or kept for them"
        raise self._refuse("tenant_busy", f"{words}; {calls} more do not fit", wait_s)

    def _check_minute(self, calls: int) -> None:
        most = self.allowance.calls_per_minute
        if not most:
            return
        self._fits_at_all(calls, most, "per minute")
        self._refill()
        left = most - self._spent - (self._kept if self._spent else self._elsewhere).spent
        if calls > left:
            words = f"this key may make {most} calls per minute; {max(0, int(left))} are left now"
            raise self._refuse("rate_limited", words, (calls - left) * MINUTE_S / most + 0.05)

    def _refuse(self, code: str, words: str, wait_s: float) -> Refusal:
        self._wants_until = self._clock() + wait_s + LATE_S
        return Refusal(code, words, retry_after_s=round(wait_s, 1))

    def _fits_at_all(self, calls: int, most: int, what: str) -> None:
        if calls > most:
            raise Refusal("too_many_calls", f"{calls} calls in one request; this key may have {most} {what}", field="$.calls")

    def _refill(self) -> None:
        """The minute refills once, however many gateways the tenant has spent it at."""
        most, now = self.allowance.calls_per_minute, self._clock()
        refilled = (now - self._spent_at) * most / MINUTE_S / self._spending
        self._spent = max(0.0, min(self._spent, float(most)) - refilled)
        self._spent_at = now

    def change(self, allowance: Allowance) -> None:
        self._refill()
        self.allowance = allowance

    # -- which ------------------------------------------------------------------------------------------------------------

    def permit(self, call: Call, index: int) -> Call:
        """The call as this tenant's own, or a refusal that names what is not allowed."""
        self.check_tenant(call.tenant, index)
        limits = self.permit_limits(call.limits, index)
        return self.own(call if limits is call.limits else msgspec.structs.replace(call, limits=limits))

    def own(self, message: M) -> M:
        """Make a message that was decoded for this request the tenant's. In place: copying each call would cost more."""
        force_setattr(message, "tenant", self.tenant)
        priority = getattr(message, "priority", None)
        if priority is not None and self.allowance.max_priority != "train":
            force_setattr(message, "priority", max(priority, self.allowance.max_priority, key=PRIORITIES.index))
        return message

    def check_tenant(self, tenant: str, index: int = 0) -> None:
        if tenant not in ("", self.tenant):
            raise NotPermitted("foreign_tenant", "this key belongs to another tenant", index, ".tenant")

    def permit_limits(self, limits: Limits, index: int = 0, at: str = ".limits") -> Limits:
        """As given; the CPU time that follows from the wall time is lowered to what the key allows."""
        self.check_limits(limits, index, at)
        return self.lowered_limits(limits) if limits.cpu_s is None and "cpu_s" in self.allowance.max_limits else limits

    def check_limits(self, limits: Limits, index: int = 0, at: str = ".limits") -> None:
        for name in self.allowance.max_limits:
            if (value := getattr(limits, name)) is not None:
                self.check_limit(name, value, index, f"{at}.{name}")

    def check_limit(self, name: LimitName, value: float, index: int, inside: str) -> None:
        most = self.allowance.max_limits.get(name, value)
        if value > most:
            raise NotPermitted("beyond_limits", f"{name} is {value:g}; with this key at most {most:g}", index, inside)

    def lowered(self, call: Call) -> Call:
        """With no limit above the key's."""
        limits = self.lowered_limits(call.limits)
        return call if limits is call.limits else msgspec.structs.replace(call, limits=limits)

    def lowered_limits(self, given: Limits) -> Limits:
        limits = msgspec.structs.asdict(given) | {"cpu_s": given.cpu_limit_s}
        most = {name: type(limits[name])(bound) for name, bound in self.allowance.max_limits.items() if limits[name] > bound}
        return Limits(**(limits | most)) if most else given

    def select(self, selection: Selection) -> Selection:
        self.check_tenant(selection.tenant)
        return self.own(selection)
