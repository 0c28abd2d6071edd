"""The gRPC methods of sessions, as a table."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from msgspec import Struct

from exec_service.api.validation import CELL, FORK, SELECTION, TENANT, Validator, Warnings, read
from exec_service.dispatch.requests import Origin
from exec_service.sessions import SessionRouter
from exec_wire import proto
from exec_wire.messages.unknown_fields import Reader


class SessionMethod(NamedTuple):
    """A method of sessions: what comes, what goes, who does it, and how the request is read."""

    request: proto.Message
    answer: proto.Message
    act: Callable[..., Awaitable[Struct]]
    reader: Callable[[Validator, dict[str, Any], Warnings], Struct] | Reader[Any]
    part: str = ""  # the field of a `SessionRequest` that is read

    async def ask(self, router: SessionRouter, validator: Validator, asked: dict[str, Any], origin: Origin) -> Struct:
        ids = (asked.get("session", ""),) if self.part else ()
        fields = asked.get(self.part, {}) if self.part else asked
        if isinstance(self.reader, Reader):
            return await self.act(router, *ids, read(self.reader, fields, origin.warnings), origin)
        return await self.act(router, *ids, self.reader(validator, fields, origin.warnings), origin)


_ONE = proto.SESSION_REQUEST
SESSION_METHODS = {
    "CreateSession": SessionMethod(proto.SESSION_SPEC, proto.SESSION_INFO, SessionRouter.create, Validator.read_session),
    "ListSessions": SessionMethod(proto.SELECTION, proto.SESSION_LIST, SessionRouter.list, SELECTION),
    "GetSession": SessionMethod(_ONE, proto.SESSION_INFO, SessionRouter.look, TENANT, "tenant"),
    "EndSession": SessionMethod(_ONE, proto.ENDED, SessionRouter.end, TENANT, "tenant"),
    "RollBackSession": SessionMethod(_ONE, proto.SESSION_INFO, SessionRouter.roll_back, TENANT, "tenant"),
    "InterruptSession": SessionMethod(_ONE, proto.INTERRUPTED, SessionRouter.interrupt, TENANT, "tenant"),
    "RunCell": SessionMethod(_ONE, proto.RESULT, SessionRouter.run, CELL, "cell"),
    "ForkSession": SessionMethod(_ONE, proto.SESSION_LIST, SessionRouter.fork, FORK, "fork"),
    "PutFiles": SessionMethod(_ONE, proto.FILES, SessionRouter.put, Validator.read_files, "files"),
    "FetchFiles": SessionMethod(_ONE, proto.FILES, SessionRouter.fetch, Validator.make_fetch, "fetch"),
}
