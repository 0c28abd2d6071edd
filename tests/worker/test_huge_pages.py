"""The warm interpreter's objects are on huge pages (native/huge_pages.c)."""

import subprocess
import sys

CHURN = """
from worker.sandbox.inside import _zygote
_zygote.use_huge_pages(1 << 30)

def deep(n):
    return n and deep(n - 1)

def resident_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) >> 10

before = resident_mb()
for _ in range(20):
    objects = [[k] for k in range(300_000)]  # about 20 MB of objects
    del objects
for _ in range(2000):
    deep(900)  # takes more of the interpreter's own stack, and gives it back
print(resident_mb() - before)
"""


def test_memory_that_imports_gave_back_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", CHURN], check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 100
