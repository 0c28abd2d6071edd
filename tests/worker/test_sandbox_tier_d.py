"""Without namespaces: what honest programs keep, and what a keeper process does in a namespace's place."""

from collections.abc import AsyncIterator

import pytest
from sandbox_harness import Lab, laboratory, need_sandbox


@pytest.fixture(scope="module")
async def bare() -> AsyncIterator[Lab]:
    need_sandbox()
    async with laboratory(mask_layers=["userns"], min_tier="D") as lab:
        yield lab


PAIRS = """
import asyncio, multiprocessing, socket
def child(pipe): pipe.send(6 * 7)
near, far = multiprocessing.Pipe()
process = multiprocessing.Process(target=child, args=(far,))
process.start(); print(near.recv()); process.join()
async def main():
    process = await asyncio.create_subprocess_exec("echo", "from a child", stdout=asyncio.subprocess.PIPE)
    print((await process.communicate())[0].decode().strip())
    print(await asyncio.to_thread(lambda: "from a thread"))
asyncio.run(main())
for kind in socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC:
    with socket.socketpair(socket.AF_UNIX, kind)[0]: print("a pair")
"""


async def test_pairs_of_streams_serve_multiprocessing_and_asyncio(bare: Lab) -> None:
    assert await bare.output(PAIRS) == "42\nfrom a child\nfrom a thread\na pair\na pair\na pair\n"


async def test_pairs_of_datagrams_are_refused(bare: Lab) -> None:
    code = "import socket\nfor kind in 2, 3, 4, 6, 10:\n    try: socket.socketpair(1, kind)\n    except OSError: print('no')"
    assert await bare.output(code) == "no\n" * 5
