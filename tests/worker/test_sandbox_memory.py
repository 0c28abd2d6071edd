"""Memory limits, by control group and by the watchdog of the tiers that have none: bombs end, honest programs run."""

from collections.abc import AsyncIterator, Sequence

import pytest
from sandbox_harness import Lab, busy_machine, laboratory

MASKS = {"cgroup": [], "watchdog": ["cgroup"], "watchdog_one_uid": ["uid", "cgroup"], "watchdog_no_jail": ["userns", "cgroup"]}
BOMBS = {
    "heap": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "one_array": "import numpy as np\nprint(np.ones(1 << 26).sum())",
    "forks": "import os, time\nfor _ in range(3): os.fork()\nb = bytearray(40 << 20)\ntime.sleep(5)",
    "shared": "import mmap, time\nm = mmap.mmap(-1, 400 << 20)\nm[:] = b'x' * (400 << 20)\ntime.sleep(5)",
}
THREADS = """
import threading
import numpy as np
def work(): results.append(float((np.ones((200, 200)) @ np.ones((200, 200)))[0, 0]))
results = []
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(results == [200.0] * 8)
"""
MANY_PROCESSES = """
import multiprocessing, time
def work(n): time.sleep(0.2); return n
with multiprocessing.Pool(12) as pool: print(sum(pool.map(work, range(24))))
"""


@pytest.fixture(scope="module", params=MASKS)
async def limited(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    async with laboratory(slots=2, mask_layers=MASKS[request.param], min_tier="D", profiles=("numpy",)) as lab:
        yield lab


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_memory_bomb_ends_as_memory_limit(limited: Lab, bomb: str) -> None:
    result = await limited.run(BOMBS[bomb], memory_mb=128, wall_s=8)
    assert (result.status, result.blame) == ("memory_limit", "model")


async def test_threads_of_numpy_run_within_the_default_limit(limited: Lab) -> None:
    assert await limited.output(THREADS) == "True\n"


async def test_what_processes_share_with_the_warm_interpreter_is_not_counted(limited: Lab) -> None:
    if "mntns" not in limited.pool.sandbox.layers:
        pytest.skip("tier D has no shared memory for the locks of multiprocessing")
    assert (await limited.run(MANY_PROCESSES, memory_mb=128, wall_s=8)).stdout == "276\n"


FILES = "for name in range({}):\n    with open(str(name), 'wb') as file: file.write(bytes(8192))"  # take long to remove


@pytest.mark.parametrize("counts", [[7000] * 5, range(50, 2500, 50)], ids=["many", "more_each_time"])
async def test_the_files_of_one_program_are_not_the_memory_of_the_next(counts: Sequence[int]) -> None:
    async with laboratory(slots=1) as lab:
        (group,) = {folder / "slot0" for folder in lab.cgroups if (folder / "slot0" / "memory.stat").exists()}
        now = next(group / name for name in ("memory.current", "memory.usage_in_bytes") if (group / name).exists())
        with busy_machine():
            for count in counts:
                result = await lab.run(FILES.format(count), memory_mb=96, wall_s=20)
                left_bytes = int(now.read_text())
                assert result.status == "ok"
                assert left_bytes < max(8 << 20, 8192 * count // 3), (count, left_bytes)
