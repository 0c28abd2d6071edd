"""No program has a capability, or gets one by executing a file, under any uid."""

import pytest
from sandbox_harness import laboratory

LOOK = """
import ctypes, subprocess
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
print(libc.capget(header, sets), any(sets), sum(libc.prctl(47, 1, number, 0, 0) > 0 for number in range(41)))
print("bounding set", [number for number in range(64) if libc.prctl(23, number, 0, 0, 0) > 0])
print(libc.prctl(39, 0, 0, 0, 0), subprocess.run(["mknod", "x", "b", "8", "0"], stderr=-3).returncode != 0)
"""
# Without a uid of its own and without a jail a program is root itself, as far as its uid goes.
MASKS = {"own_uid": [], "root_of_the_jail": ["uid"], "own_uid_no_jail": ["userns"], "root_itself": ["userns", "uid"]}


@pytest.mark.parametrize("mask", MASKS)
async def test_program_has_no_capability(mask: str) -> None:
    async with laboratory(slots=1, mask_layers=MASKS[mask], min_tier="D") as lab:
        assert await lab.output(LOOK) == "0 False 0\nbounding set []\n1 True\n"
