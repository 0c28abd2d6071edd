"""Whether programs can be run now, as every door says it."""

from __future__ import annotations

from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.workers import Fleet
from exec_service.refusals import Refusal


def check_ready(dispatch: Dispatch, fleet: Fleet, *, cluster: bool) -> None:
    """Raise a `Refusal` if they cannot. In a cluster calls may wait for workers that are still to come."""
    dispatch.check_ready()
    if not cluster and not fleet.alive:
        raise Refusal("not_ready", "no worker is alive", retry_after_s=1.0)
