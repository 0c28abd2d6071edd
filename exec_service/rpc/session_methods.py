"""The gRPC methods of sessions, as a table."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from msgspec import Struct

from exec_service.api.validation import CELL, FORK, SELECTION, TENANT, Validator, read
from exec_service.dispatch.requests import Origin
from exec_service.sessions import SessionRouter
from exec_wire import proto
from exec_wire.messages.sessions import Tenant


class SessionMethod(NamedTuple):
    """A method of sessions: what comes, who does it, what goes."""

    request: proto.Message
    answer: proto.Message
    ask: Callable[[SessionRouter, Validator, dict[str, Any], Origin], Awaitable[Struct]]


SESSION_METHODS = {
    "CreateSession": SessionMethod(
        proto.SESSION_SPEC,
        proto.SESSION_INFO,
        lambda router, check, asked, origin: router.create(check.read_session(asked, origin.warnings), origin),
    ),
    "ListSessions": SessionMethod(
        proto.SELECTION,
        proto.SESSION_LIST,
        lambda router, _, asked, origin: router.list(read(SELECTION, asked, origin.warnings), origin),
    ),
    **{
        name: SessionMethod(proto.SESSION_REQUEST, answer, ask)
        for name, answer, ask in (
            ("GetSession", proto.SESSION_INFO, lambda router, _, asked, origin: router.look(*_who(asked, origin), origin)),
            ("EndSession", proto.ENDED, lambda router, _, asked, origin: router.end(*_who(asked, origin), origin)),
            (
                "RollBackSession",
                proto.SESSION_INFO,
                lambda router, _, asked, origin: router.roll_back(*_who(asked, origin), origin),
            ),
            (
                "InterruptSession",
                proto.INTERRUPTED,
                lambda router, _, asked, origin: router.interrupt(*_who(asked, origin), origin),
            ),
            (
                "RunCell",
                proto.RESULT,
                lambda router, _, asked, origin: router.run(
                    _id(asked), read(CELL, asked.get("cell", {}), origin.warnings), origin
                ),
            ),
            (
                "ForkSession",
                proto.SESSION_LIST,
                lambda router, _, asked, origin: router.fork(
                    _id(asked), read(FORK, asked.get("fork", {}), origin.warnings), origin
                ),
            ),
            (
                "PutFiles",
                proto.FILES,
                lambda router, check, asked, origin: router.put(
                    _id(asked), check.read_files(asked.get("files", {}), origin.warnings), origin
                ),
            ),
            (
                "FetchFiles",
                proto.FILES,
                lambda router, check, asked, origin: router.fetch(
                    _id(asked), check.make_fetch(asked.get("fetch", {}), origin.warnings), origin
                ),
            ),
        )
    },
}


def _id(asked: dict[str, Any]) -> str:
    id: str = asked.get("session", "")
    return id


def _who(asked: dict[str, Any], origin: Origin) -> tuple[str, Tenant]:
    return _id(asked), read(TENANT, asked.get("tenant", {}), origin.warnings)
