"""The spare: a child that a zygote forks while no program runs, and that the next program gets."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from common import until
from sandbox_harness import Lab, children_of, is_alive, laboratory, processes_in, uid_of
from test_sandbox_setup_faults import STEPS, WRITES

from worker.sandbox.uids import BLOCK_SIZE

OF_SPARE = "oom_victim session namespaces workspace proc folder".split()
SLEEPS = "import time\ntime.sleep(30)"
ABOUT_ITSELF = """
import os, resource, sys
status = open('/proc/self/status').read().splitlines()
print([line for line in status if line.startswith(('Uid', 'Gid', 'Groups', 'Cap', 'NoNewPrivs', 'Seccomp', 'Sig', 'Pid', 'PPid',
    'NSsid', 'NSpid', 'Threads', 'Umask', 'CoreDumping'))])
print({name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith('RLIMIT_')})
print(open('/proc/self/oom_score_adj').read(), open('/proc/self/cgroup').read())
print([(fd, os.readlink(f'/proc/self/fd/{fd}').split(':')[0]) for fd in sorted(os.listdir('/proc/self/fd'))[:3]])
print(open('/proc/self/mountinfo').read().count('\\n'), os.getcwd(), *map(os.listdir, ('.', '/dev/shm', '/mnt', '/w/call')))
print(sorted(os.environ.items()), sorted(sys.modules), sorted(globals()), sys.argv, sys.path, sys.flags)
print(sorted(os.listdir('/proc')), open('/proc/net/unix').read() if os.path.exists('/proc/net/unix') else '')
"""


@pytest.fixture(scope="module")
async def lab() -> AsyncIterator[Lab]:
    """With one zygote."""
    async with laboratory() as lab:
        yield lab


@pytest.fixture(scope="module")
async def faulty_lab() -> AsyncIterator[Lab]:
    async with laboratory(fault_injection=True) as lab:
        yield lab


def spare_of(lab: Lab) -> list[int]:
    """The pids of the spare and of its stub, if it waits."""
    base, found = lab.uid_base, {}
    for child in [child for zygote in lab.zygote_pids for child in children_of(zygote)]:
        with suppress(OSError):  # it has just ended
            if uid_of(child) == base + BLOCK_SIZE - 1:
                found["stub"] = child
            elif uid_of(child) == base and "__skb_wait" in Path(f"/proc/{child}/wchan").read_text():
                found["spare"] = child
    return [found["spare"], found["stub"]] if len(found) == 2 else []


def files_of(pid: int) -> list[str]:
    """Without the three that a program replaces."""
    return [str(fd.readlink()).split(":")[0] for fd in Path(f"/proc/{pid}/fd").iterdir() if int(fd.name) > 2]


async def next_spare(lab: Lab) -> int:
    """Its pid, once it waits."""
    await lab.run("pass")
    spare: list[int] = []
    await until(lambda: spare.extend(spare_of(lab)) or spare, "a spare waits")
    return spare[0]


async def test_program_after_a_pause_is_the_spare(lab: Lab) -> None:
    spare = await next_spare(lab)
    running = asyncio.create_task(lab.run(SLEEPS))
    await until(lambda: spare in processes_in(lab.cgroups), "the spare is in the control groups of a slot")
    assert uid_of(spare) - lab.uid_base in range(1, BLOCK_SIZE - 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not is_alive(spare)


async def test_spare_belongs_to_no_slot_and_holds_nothing(lab: Lab) -> None:
    spare = await next_spare(lab)
    assert lab.sandboxed_pids == []
    assert processes_in(lab.cgroups) == []
    held = files_of(spare)
    assert set(held) == {"/dev/null", "anon_inode", "socket"}
    assert (held.count("anon_inode"), held.count("socket")) == (1, 1)  # its Landlock rules, and where its program comes from


async def test_program_in_a_spare_sees_what_any_other_sees(lab: Lab) -> None:
    spare = await next_spare(lab)
    in_spare = await lab.output(ABOUT_ITSELF)
    assert not is_alive(spare)
    await lab.run("pass", file_mb=8)
    assert await lab.output(ABOUT_ITSELF) == in_spare  # at once, before there is another spare


async def test_call_with_another_size_of_its_folder_does_not_get_the_spare(lab: Lab) -> None:
    spare = await next_spare(lab)
    free = "import os\ns = os.statvfs('/tmp')\nprint(s.f_blocks * s.f_frsize >> 20)"
    assert await lab.output(free, file_mb=8) == "8\n"
    await until(lambda: not is_alive(spare), "the spare is gone")
    await until(lambda: spare_of(lab), "another one waits")
    assert await lab.output(free, file_mb=8) == "8\n"


async def test_no_two_spares_draw_the_same_random_numbers(lab: Lab) -> None:
    drawn = set()
    for _ in range(3):
        await next_spare(lab)
        drawn.add(await lab.output("import random\nprint(random.random())"))
    assert len(drawn) == 3


async def test_program_leaves_no_trace_in_the_next_spare(lab: Lab) -> None:
    marks = (
        "import builtins, os, sys\nbuiltins.mark = sys.mark = 1\nopen('/tmp/mark', 'w').write('x')\nos.environ['MARK'] = '1'"
    )
    looks = "import builtins, os, sys\nprint(dir(builtins) + dir(sys) + os.listdir('/tmp') + list(os.environ))"
    before = await lab.output(looks)
    await next_spare(lab)
    await lab.output(marks)
    await until(lambda: spare_of(lab), "a spare waits")
    assert await lab.output(looks) == before


async def test_spare_that_is_killed_costs_no_call(lab: Lab) -> None:
    for victim in (0, 1):  # itself, or its stub
        await next_spare(lab)
        os.kill(pid := spare_of(lab)[victim], signal.SIGKILL)
        await until(lambda pid=pid: not is_alive(pid), "it is dead")
        assert await lab.output("print('fine')") == "fine\n"
    assert await next_spare(lab)


async def test_spare_dies_with_its_zygote() -> None:
    async with laboratory() as lab:
        await next_spare(lab)
        family = spare_of(lab)
        for zygote in lab.zygote_pids:
            os.kill(zygote, signal.SIGKILL)
        await until(lambda: not any(map(is_alive, family)), "spare and stub are dead")


async def test_old_spare_is_replaced(faulty_lab: Lab) -> None:
    spare = await next_spare(faulty_lab)
    await until(lambda: not is_alive(spare) and spare_of(faulty_lab), "a younger one waits")  # in a minute; here in a second


@pytest.mark.parametrize("step", [step for step in STEPS if step not in OF_SPARE])
async def test_failed_step_of_a_spare_means_internal_error_and_no_byte_of_the_program(faulty_lab: Lab, step: str) -> None:
    spare = await next_spare(faulty_lab)
    result = await faulty_lab.run(WRITES, fail_step=step, fetch_files=["ran"], echo_value=True)
    await until(lambda: not is_alive(spare), "the spare is dead")
    assert (result.status, result.blame) == ("internal_error", "infra")
    assert step in result.error
    assert (result.stdout, result.stderr, result.files, result.value, result.completed) == ("", "", {}, None, False)


@pytest.mark.parametrize("step", OF_SPARE)
async def test_spare_whose_set_up_fails_gets_no_program(faulty_lab: Lab, step: str) -> None:
    assert step in (await faulty_lab.run(WRITES, fail_step=step)).error  # from now on spares fail there
    await until(lambda: not any(map(children_of, faulty_lab.zygote_pids)), "the spare has failed")
    assert await faulty_lab.output("print('fine')") == "fine\n"
    assert await next_spare(faulty_lab)
