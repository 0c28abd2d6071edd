"""Run programs in the sandboxes of an exec service. Needs httpx and msgspec only.

>>> from exec_client import Client
>>> with Client() as client:
...     print(client.run("print(6 * 7)").stdout, end="")
42
"""

from exec_client._calls import CallFields
from exec_client._retry import Policy
from exec_client._transport import DEFAULT_URL, HttpTransport, Transport
from exec_client.aio import AsyncClient
from exec_client.errors import (
    BadRequest,
    CallerError,
    ClientClosed,
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    ExecError,
    Forbidden,
    InfraFailure,
    NotReady,
    Overloaded,
    ProtocolError,
    ServiceFailed,
    SessionLost,
    TooLarge,
    Unavailable,
    UnknownArgument,
    UsageError,
    WrongEventLoop,
)
from exec_client.judging import JudgeFields, VerifyFields
from exec_client.sessions import AsyncSession, CellFields, SessionFields
from exec_client.sync import Client, Session
from exec_wire import Call, Checker, Info, Judge, Judgement, Limits, Result, Tags, Test, Verdict, Verification, Verify
from exec_wire.messages.sessions import SessionInfo

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "AsyncSession",
    "BadRequest",
    "Call",
    "CallFields",
    "CallerError",
    "CellFields",
    "Checker",
    "Client",
    "ClientClosed",
    "Conflict",
    "ConnectionFailed",
    "DeadlineExceeded",
    "ExecError",
    "Forbidden",
    "HttpTransport",
    "Info",
    "InfraFailure",
    "Judge",
    "JudgeFields",
    "Judgement",
    "Limits",
    "NotReady",
    "Overloaded",
    "Policy",
    "ProtocolError",
    "Result",
    "ServiceFailed",
    "Session",
    "SessionFields",
    "SessionInfo",
    "SessionLost",
    "Tags",
    "Test",
    "TooLarge",
    "Transport",
    "Unavailable",
    "UnknownArgument",
    "UsageError",
    "Verdict",
    "Verification",
    "Verify",
    "VerifyFields",
    "WrongEventLoop",
]
