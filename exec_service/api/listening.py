"""Where a service listens: which addresses it may use, their sockets, and the server that owns them."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

HAND_OVER_S = 5.0
CLOSE_S = 5  # the rest of a shutdown once every call is answered: slow readers still receive bytes


class BindRefused(Exception):
    """The service must not listen on this address; the message says why."""


class PortTaken(Exception):
    """Another process listens there; the message says where."""


class GrpcPortTaken(PortTaken):
    """Another process listens on the port for gRPC."""


def check_bind(host: str) -> None:
    """Raise `BindRefused` unless a service without keys may listen on `host`."""
    if not is_loopback(host):
        raise BindRefused(
            f"refusing to listen on {host!r}: anyone who reaches the port can run programs, and no keys are required. "
            "Use 127.0.0.1 (the default), ::1 or localhost; or make keys, "
            "exec-service keys add --file keys.json --tenant NAME, and start with --keys keys.json."
        )


def is_loopback(host: str) -> bool:
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def bind(
    host: str, port: int, *, keys: bool = False, hint: str = "--port 9000 (make run PORT=9000)", shared: bool = False
) -> socket.socket:
    """Bind a socket for uvicorn, which by itself ends the process when the port is taken. `shared`: other processes of this
    gateway may have it."""
    family, address = address_of(host, port, keys=keys)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}. Choose another port: {hint}") from error
    sock.setblocking(False)
    return sock


def address_of(host: str, port: int, *, keys: bool) -> tuple[socket.AddressFamily, Any]:
    """The address to bind. Without keys it must be a loopback address, whatever its name resolves to."""
    if not keys:
        check_bind(host)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}") from error
    if not keys and not is_loopback(str(address[0])):
        raise BindRefused(f"refusing to listen on {host!r}: it resolves to {address[0]}, which is not a loopback address")
    return family, address


def address_for_grpc(host: str, port: int, *, keys: bool, shared: bool = False) -> str:
    """The address in gRPC's notation. Binds it for a moment to see that it is free: gRPC itself only logs a failure."""
    try:
        with bind(host, port, keys=keys, hint="--grpc-port 50052; none: --grpc-port 0", shared=shared) as probe:
            name, number = probe.getsockname()[:2]
    except PortTaken as error:
        raise GrpcPortTaken(f"gRPC {error}") from error
    return f"[{name}]:{number}" if ":" in name else f"{name}:{number}"


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the process that embeds it decides when it ends."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    async def hand_over(self) -> None:
        """Leave new connections to the other processes at the same socket; close each connection after its next answer, and
        those that are idle for `HAND_OVER_S`. Refuses nothing."""
        for server in self.servers:
            server.close()
        for headers in (self.config.encoded_headers, self.server_state.default_headers):
            headers.append((b"connection", b"close"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                while self.server_state.connections:  # noqa: ASYNC110 - uvicorn does not say when it changes
                    await asyncio.sleep(0.05)
        for connection in list(self.server_state.connections):
            connection.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
