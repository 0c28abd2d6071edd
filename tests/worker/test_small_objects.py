"""Small objects in an area of their own (native/small_objects.c) behave as everywhere else."""

import sys

import pytest
from sandbox_harness import Lab

CHURN = """
import random

def content(key, size):
    return bytes((key + at) % 251 for at in range(size))

chance, blocks = random.Random(7), {}
for step in range(60_000):
    key, size = chance.randrange(400), chance.randrange(700)
    if key not in blocks:
        blocks[key] = bytearray(content(key, size))
    elif chance.random() < 0.5:
        block = blocks[key]
        kept = min(size, len(block))
        block[kept:] = content(key, size)[kept:]  # grows or shrinks where it is, or moves
    else:
        block = blocks.pop(key)
        assert block == content(key, len(block)), (step, key)
assert all(block == content(key, len(block)) for key, block in blocks.items())
print("all there")
"""

SMALL_AND_LARGE = """
kept = []
for round_ in range(3):
    kept = [(k, str(k), [k], {k: k}) for k in range(50_000)]  # many times what it holds, and all of it given back again
    assert all(k == int(text) == numbers[0] == pairs[k] for k, text, numbers, pairs in kept)
print(len(kept))
"""

TRACED = """
import tracemalloc
before = [bytes(100) for _ in range(100)]
tracemalloc.start()
during = [bytes([k]) * 100 for k in range(100)]
assert tracemalloc.get_traced_memory()[0] > 10_000
del before
tracemalloc.stop()
assert all(block == bytes([k]) * 100 for k, block in enumerate(during))
print("traced")
"""

IN_THREADS_AND_FORKS = """
import os, threading

def work(seed):
    objects = [[seed, str(k)] for k in range(20_000)]
    wrong.extend(one for k, one in enumerate(objects) if one != [seed, str(k)])

wrong = []
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
child = os.fork()
work(5)
if not child:
    os._exit(len(wrong))
print(os.waitpid(child, 0)[1], wrong)
"""

INTERPRETERS = """
import sys, threading
if sys.version_info < (3, 13):
    import _xxsubinterpreters as interpreters
else:
    import _interpreters as interpreters
WORK = '''
kept = [(k, str(k), [k], {k: k}) for k in range(5_000)]
for _ in range(20):
    kept = [(k, str(k), [k], {k: k}) for k, *_ in kept]
assert all(k == int(text) == numbers[0] == pairs[k] for k, text, numbers, pairs in kept)
'''
wrong = []
def inside():
    try:
        name = interpreters.create()
        error = interpreters.run_string(name, WORK)
        if error is not None:
            wrong.append(error)
        interpreters.destroy(name)
    except BaseException as error:
        wrong.append(error)
threads = [threading.Thread(target=inside) for _ in range(3)]
for thread in threads:
    thread.start()
exec(WORK)
for thread in threads:
    thread.join()
exec(WORK)
print(wrong)
"""


async def test_blocks_that_grow_shrink_and_go_keep_what_is_in_them(lab: Lab) -> None:
    assert (await lab.run(CHURN)).stdout == "all there\n"


async def test_what_is_too_much_for_it_is_elsewhere(lab: Lab) -> None:
    result = await lab.run(SMALL_AND_LARGE)
    assert result.stdout == "50000\n", result.stderr


async def test_allocations_can_be_traced(lab: Lab) -> None:
    result = await lab.run(TRACED)
    assert result.stdout == "traced\n", result.stderr


async def test_threads_and_forks_share_it(lab: Lab) -> None:
    result = await lab.run(IN_THREADS_AND_FORKS)
    assert result.stdout == "0 []\n", result.stderr


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python's interpreters share one lock")
async def test_interpreters_with_locks_of_their_own_do_not_disturb_each_other(lab: Lab) -> None:
    result = await lab.run(INTERPRETERS, wall_s=60, cpu_s=60)
    assert result.stdout == "[]\n", result.stderr
