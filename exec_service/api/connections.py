"""Limits on HTTP connections: bytes and time of the headers, time of the body, number of connections.

uvicorn limits none of these, and an app sees a request only when its headers are complete. Every HTTP port of the service uses
this. Admission limits the memory of bodies (`api.calls.Endpoint`).
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from exec_wire.messages.calls import encode_json
from exec_wire.problems import CONTENT_TYPE, problem

BODY_BYTES_PER_S = 128 << 10  # a faster body may take longer than `body_s`
MAX_PIPELINED = 64  # requests that a client may send before their answers
LINGER_S = 5.0  # for the last bytes of a refusal
OWN_DESCRIPTORS = 256  # listening sockets, the queue, files of jobs, the metrics port
MOST_CONNECTIONS = 32768  # default: each may hold the headers of an unfinished request


@dataclass(eq=False)
class Bounds:
    """The limits of one server. `refused` is called with the problem code of each closed connection."""

    max_connections: int
    max_header_bytes: int = 64 << 10
    header_s: float = 30.0
    body_s: float = 60.0
    write_stall_s: float = 60.0
    refused: Callable[[str], None] = lambda code: None
    unread: dict[BoundedProtocol, None] = field(default_factory=dict)  # without a complete request, longest waiting first


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, bounds: Bounds, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bounds = bounds
        self._loose_bytes = 0  # received since the last complete request, headers or piece of a body
        self._in_body = False
        self._body_bytes = 0
        self._waiting_since: float | None = None  # waiting for the rest of the headers or of the body
        self._timer: asyncio.TimerHandle | None = None
        self._cut: asyncio.TimerHandle | None = None
        self.on_lost: Callable[[], object] | None = None  # see `api.streaming.on_disconnect`
        self._wrong = ("bad_http", "these bytes are not a request")

    # -- the connection ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bounds.unread[self] = None
        self._wait()
        if len(self.connections) > self._bounds.max_connections:
            idlest = next((other for other in self._bounds.unread if not other.transport.is_closing()), self)
            idlest._refuse("connections_full", f"at most {self._bounds.max_connections} are kept open")

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.unread.pop(self, None)
        for timer in (self._timer, self._cut):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cut_in(self._bounds.write_stall_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._cut is not None and not self.transport.is_closing():
            self._cut.cancel()
            self._cut = None

    def _cut_in(self, seconds: float) -> None:
        """Abort after `seconds` unless all bytes are written: a peer that reads nothing keeps a closed connection open."""
        if self._cut is None:
            self._cut = self.loop.call_later(seconds, self.transport.abort)

    # -- received data ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._loose_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._loose_bytes > self._bounds.max_header_bytes:
            self._refuse("headers_too_large", f"at most {self._bounds.max_header_bytes} bytes are read")
        elif (self._loose_bytes or self._in_body) and self._waiting_since is None:
            self._wait()

    def on_headers_complete(self) -> None:
        if self._loose_bytes > self._bounds.max_header_bytes:  # else they cannot be too large
            bytes_ = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if bytes_ > self._bounds.max_header_bytes:
                self._stop_reading("headers_too_large", f"{bytes_} bytes; at most {self._bounds.max_header_bytes} are read")
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_reading("bad_http", f"more than {MAX_PIPELINED} requests without waiting for an answer")
        self._loose_bytes, self._in_body, self._body_bytes, self._waiting_since = 0, True, 0, None
        self.scope["exec.connection"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._loose_bytes, self._in_body, self._waiting_since = 0, False, None
        self._bounds.unread.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._bounds.unread.setdefault(self)
        super().on_response_complete()
        if self.transport.is_closing():
            self._bounds.unread.pop(self, None)
            self._cut_in(self._bounds.write_stall_s)

    # -- missing data -----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        self._waiting_since = self.loop.time()
        due = self._waiting_since + self._allowed_s()
        if self._timer is not None and self._timer.when() <= due:
            return  # it fires earlier and checks again
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._look)

    def _allowed_s(self) -> float:
        if not self._in_body:
            return self._bounds.header_s
        if self.cycle.response_complete:  # the rest is not needed
            return self._bounds.body_s
        return self._bounds.body_s + self._body_bytes / BODY_BYTES_PER_S

    def _look(self) -> None:
        self._timer = None
        if self._waiting_since is None or self.transport.is_closing():
            return
        left_s = self._waiting_since + self._allowed_s() - self.loop.time()
        if self.flow.read_paused:  # the gateway itself does not read, so the peer's time starts again
            self._waiting_since = self.loop.time()
            left_s = max(left_s, 1.0)
        if left_s > 0:
            self._timer = self.loop.call_later(min(left_s, self._bounds.body_s), self._look)
        else:
            self._refuse("too_slow", f"the {'body' if self._in_body else 'headers'} did not arrive in time")

    # -- the end ----------------------------------------------------------------------------------------------------------

    def _stop_reading(self, code: str, detail: str) -> None:
        """Called within the parser, which treats any exception as a bad request and calls `send_400_response`."""
        self._wrong = (code, detail)
        raise ValueError(code)

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._wrong)

    def _refuse(self, code: str, detail: str) -> None:
        if self.transport.is_closing():
            return
        self._bounds.refused(code)
        if self._can_answer():
            refusal = problem(code, detail)
            body = encode_json(refusal)
            head = b"content-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (CONTENT_TYPE.encode(), len(body))
            self.transport.write(STATUS_LINE[refusal.status] + head + body)
        self._close()

    def _can_answer(self) -> bool:
        """Whether a caller waits for an answer that has not begun; an idle connection is closed without one."""
        if self.cycle is None:
            return True
        if self._in_body:
            return not self.cycle.response_started and not self.pipeline
        return self._loose_bytes > 0 and self.cycle.response_complete

    def _close(self) -> None:
        self._bounds.unread.pop(self, None)
        if not self.transport.is_closing():
            self.transport.close()
            self._cut_in(LINGER_S)


def server_config(app: Any, bounds: Bounds, **settings: Any) -> uvicorn.Config:
    """The uvicorn settings that all servers share."""
    return uvicorn.Config(
        app,
        http=partial(BoundedProtocol, bounds),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # no proxy is trusted to name the client
        **settings,
    )


def room_for_connections(reserved: int, most: int = 0) -> int:
    """The number of connections that leaves `reserved` descriptors and the process's own; at most `most` if set.

    Raises the soft limit to the hard limit. If that is too low, connections get a quarter of it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = hard if hard != resource.RLIM_INFINITY else MOST_CONNECTIONS + OWN_DESCRIPTORS + reserved
    return min(most or MOST_CONNECTIONS, max(files - OWN_DESCRIPTORS - reserved, files // 4))
