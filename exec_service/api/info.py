"""The body of `GET /v1/info`, and whether the service is ready."""

from functools import cache
from typing import get_args, get_type_hints

import msgspec
from msgspec import Meta

from exec_service.config import GatewayConfig, package_version
from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.workers import WorkerRegistry
from exec_service.refusals import Refusal
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Call, Limits
from exec_wire.messages.stats import Info, LimitValues, RequestLimits, WorkerSummary


def info_of(config: GatewayConfig, worker_registry: WorkerRegistry, account: Account | None = None) -> Info:
    return Info(
        version=package_version(),
        tier=worker_registry.tier,
        layers=worker_registry.layers,
        slots=worker_registry.slots,
        workers=len(worker_registry.workers),
        profiles=worker_registry.profiles,
        languages=worker_registry.languages,
        limits=limits_of(config, account),
        requests=RequestLimits(config.max_calls_per_request, config.max_body_bytes, config.max_calls, config.max_bytes),
        worker_list=worker_summaries(worker_registry),
    )


def limits_of(config: GatewayConfig, account: Account | None) -> LimitValues:
    known = limit_values()
    own: dict[str, float] = {"output_kb": config.max_output_kb}
    for name, most in (account.allowance.max_limits if account is not None else {}).items():
        own[name] = min(most, own.get(name, most))
    return LimitValues(known.default, {name: min(most, own.get(name, most)) for name, most in known.maximum.items()})


def worker_summaries(worker_registry: WorkerRegistry) -> list[WorkerSummary]:
    return [WorkerSummary(one.id, one.slots, one.busy, one.tier, one.profiles) for one in worker_registry.workers]


@cache
def limit_values() -> LimitValues:
    """Defaults and maxima as the message types declare them."""
    default: dict[str, float] = {}
    maximum: dict[str, float] = {}
    for owner, names in ((Limits, Limits.__struct_fields__), (Call, ("deadline_s",))):
        hints = get_type_hints(owner, include_extras=True)
        defaults = {field.name: field.default for field in msgspec.structs.fields(owner)}
        for name in names:
            kinds = (hints[name], *get_args(hints[name]))  # the type, or those of a union
            meta = next(part for kind in kinds for part in get_args(kind) if isinstance(part, Meta))
            assert meta.le is not None
            default[name], maximum[name] = defaults[name], meta.le
    return LimitValues(default | {"cpu_s": Limits().cpu_limit_s}, maximum)


def check_ready(dispatch: Dispatch, worker_registry: WorkerRegistry, *, cluster: bool) -> None:
    """Raise a `Refusal` if no program can run now. In a cluster calls may wait for workers that start later."""
    dispatch.check_ready()
    if not cluster and not worker_registry.alive:
        raise Refusal("not_ready", "no worker is alive", retry_after_s=1.0)
