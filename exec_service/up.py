"""Everything on one machine: a gateway, the in-memory queue and one worker in this process, its runner beside it.

The story of a stop (Ctrl-C, SIGTERM): admit nothing new, finish what runs or answer it, close the doors; then the runner kills
what is left in the jails and removes what it made.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from exec_service.app import Gateway, serve
from exec_service.config import GatewayConfig
from exec_wire.memory_queue import MemoryQueue
from worker.config import WorkerConfig
from worker.consumer import Consumer
from worker.pool import Pool

NAME = "embedded"
GREETING = """
exec-service is ready on {url} (sandbox tier {tier}, {slots} slots). Try:

  curl -s {url}/v1/run -H 'content-type: application/json' -d '{{"code": "print(6 * 7)"}}'

Documentation of the API: {url}/docs     Stop with Ctrl-C.
"""


async def up(gateway_config: GatewayConfig, worker_config: WorkerConfig) -> None:
    """Serve until a signal comes. Raises `BindRefused`, `PortTaken` or `SandboxUnavailable`, each with words for the user."""
    queue = MemoryQueue()
    stop, url = stop_on_signals(), asyncio.get_running_loop().create_future()
    async with Gateway(gateway_config, queue.gateway(NAME)) as gateway:
        serving = asyncio.create_task(serve(gateway, stop=stop, listening=url.set_result))
        try:
            await asyncio.wait({serving, url}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await _work(worker_config, queue, gateway, url.result(), stop, serving)
        finally:
            stop.set()
            await serving


async def _work(
    config: WorkerConfig, queue: MemoryQueue, gateway: Gateway, url: str, stop: asyncio.Event, serving: asyncio.Task[None]
) -> None:
    """The worker's life: until the gateway has drained, so that what was accepted is finished."""
    say("warming up the interpreters …")
    async with Pool(config) as pool:
        warm, stopping = asyncio.create_task(pool.wait_ready()), asyncio.create_task(stop.wait())
        await asyncio.wait({warm, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not warm.done():
            warm.cancel()
            return
        await warm
        async with Consumer(NAME, pool, queue.worker(NAME)):
            await gateway.fleet.refresh()
            gateway.dispatch.look_again()
            say(GREETING.format(url=url, tier=pool.sandbox.tier, slots=pool.slots))
            await asyncio.wait({serving})


def stop_on_signals() -> asyncio.Event:
    """Set by the first Ctrl-C or SIGTERM; the second one ends the process as usual."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        stop.set()
        say("stopping: finishing what was accepted (again to stop at once) …")
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
