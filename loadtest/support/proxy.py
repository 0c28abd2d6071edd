"""A TCP proxy to a server on this machine that can stall or cut its connections."""

import asyncio
import threading
from typing import Self


class Proxy:
    """Forwards bytes to a server. `stall` keeps connections open and accepts new ones, but forwards nothing."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stall(self) -> None:
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    def cut(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there_writer = None
        try:
            await self._open.wait()
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for end in (writer, there_writer):
                if end is not None:
                    end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionError("one side closed the connection")


class ProxyThread:
    """A `Proxy` on an event loop in its own thread, for synchronous code."""

    def __init__(self, port: int) -> None:
        self._proxy = Proxy(port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._proxy.__aenter__(), self._loop).result(5)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._proxy.__aexit__(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    @property
    def url(self) -> str:
        return self._proxy.url

    def stall(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.stall)

    def go_on(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.go_on)
