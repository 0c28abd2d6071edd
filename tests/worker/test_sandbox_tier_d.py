"""Without namespaces: what honest programs keep, and what a supervisor process does instead of a namespace."""

from collections.abc import AsyncIterator

import pytest
from sandbox_harness import Lab, laboratory


@pytest.fixture(scope="module")
async def bare() -> AsyncIterator[Lab]:
    async with laboratory(mask_layers=["userns"], min_tier="D") as lab:
        yield lab


@pytest.fixture(scope="module")
async def one_slot() -> AsyncIterator[Lab]:
    """The next program is in the slot of the last one."""
    async with laboratory(slots=1, mask_layers=["userns"], min_tier="D") as lab:
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


MANY_FILES = "for n in range(120_000): open(str(n), 'x').close()"
LOCKED = """
import os
for depth in range(50):
    os.mkdir("d"); os.symlink("/usr", "link"); os.mkfifo("pipe"); os.mkdir("0"); os.chdir("d")
for depth in range(50):
    os.chdir(".."); os.path.exists("d") and os.system("chmod 0 d 0")
"""


async def test_removing_what_another_left_does_not_cost_a_program_its_time(one_slot: Lab) -> None:
    await one_slot.output(MANY_FILES, wall_s=30, cpu_s=30, memory_mb=512)
    result = await one_slot.run("import os\nprint(os.listdir('.'))", wall_s=0.15)
    assert (result.status, result.stdout) == ("ok", "[]\n"), result.error
    assert result.usage.wall_s < 0.15


async def test_locked_folders_links_and_pipes_that_another_left_are_gone(one_slot: Lab) -> None:
    await one_slot.output(LOCKED)
    assert await one_slot.output("import os\nprint(os.listdir('.'), os.listdir('..'), os.path.isdir('/usr/bin'))") in (
        "[] ['tmp', 'main.py'] True\n",
        "[] ['main.py', 'tmp'] True\n",
    )
