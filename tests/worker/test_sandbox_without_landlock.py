"""In a jail, without Landlock: namespaces and a read-only root hold what it would hold."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_harness import OWN_BASE, Lab, laboratory, need_sandbox

from worker.selftest import self_test

pytestmark = pytest.mark.vm
MASKS = {"own_uid": ["landlock"], "root_of_the_jail": ["landlock", "uid"]}


@pytest.fixture(scope="module", params=MASKS)
async def open_lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    async with laboratory(mask_layers=MASKS[request.param], min_tier="C") as lab:
        yield lab


async def test_tier_is_c_and_the_layers_say_what_is_missing(open_lab: Lab) -> None:
    assert open_lab.pool.sandbox.tier == "C"
    assert "landlock" not in open_lab.pool.sandbox.layers
    assert open_lab.pool.missing["landlock"] == "masked by configuration"


async def test_the_self_test_finds_nothing(open_lab: Lab) -> None:
    assert await self_test(open_lab.pool) == []


WRITE = """
import os
def try_to(what, path, do):
    try: do()
    except OSError: pass
    else: print("escaped:", what, path)
for line in open("/proc/self/mountinfo"):
    path = line.split()[4]
    if path in ("/w/call", "/proc"): continue
    if os.path.isdir(path):
        try_to("make", path, lambda: os.close(os.open(path + "/made", os.O_CREAT | os.O_WRONLY)))
        try_to("rename", path, lambda: os.rename(path, path + "2"))
    try_to("change", path, lambda: os.chmod(path, 0o777))
    if os.path.isfile(path): try_to("truncate", path, lambda: os.truncate(path, 0))
init = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
for path in "/proc/1/mem", "/proc/1/root", "/proc/1/fd": try_to("reach", path, lambda: os.open(path, os.O_RDONLY))
print(init)
"""


async def test_program_changes_no_mount_of_the_jail_and_does_not_see_its_init(open_lab: Lab) -> None:
    assert await open_lab.output(WRITE) == "[]\n"


BELOW = "/usr/local/src"  # of every Debian; a file system mounted there is below the jail's /usr
WRITE_BELOW = f"""
import os
print(os.path.ismount("{BELOW}"))
try: open("{BELOW}/made", "w")
except OSError as error: print(error.strerror)
"""


def test_file_system_that_the_host_mounted_below_usr_is_read_only_in_the_jail() -> None:
    need_sandbox()
    if not Path(BELOW).is_dir():
        pytest.skip(f"there is no {BELOW}")
    mount = 'mount -t tmpfs -o mode=1777 tmpfs "$1" && shift && exec "$@"'
    run = [sys.executable, "-m", "exec_service", "run", "-c", WRITE_BELOW]
    told = {"EXEC_MASK_LAYERS": '["landlock"]', "EXEC_MIN_TIER": "C", "EXEC_UID_BASE": str(OWN_BASE)}
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", mount, "sh", BELOW, *run],
        env=os.environ | told, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.stdout == "True\nRead-only file system\n", ended.stderr
