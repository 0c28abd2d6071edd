"""What the soak says about a cluster at rest: whose CPU time counts, and which thread used it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest import meter, soak

SPIN = "while True: pass"
ORPHAN = f"import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SPIN!r}], stdout=subprocess.DEVNULL).pid)"


def need_cgroups() -> None:
    if os.geteuid() != 0 or not (meter._own_group("cgroup", "cpuacct") or meter._own_group("cgroup2", "")):
        pytest.skip("this needs root and control groups")


def test_rest_names_the_busy_thread_even_of_an_orphan_and_leaves_other_processes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    need_cgroups()
    monkeypatch.setattr(soak, "REST_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", SPIN]) as stranger:
        try:
            with meter.OwnProcesses("rest-test") as own:
                orphan = int(subprocess.check_output([sys.executable, "-c", ORPHAN]))
                try:
                    found = soak.look_at_rest(own)
                finally:
                    os.kill(orphan, signal.SIGKILL)
        finally:
            stranger.kill()
    busiest = next(iter(found.threads))
    assert f"process {orphan}," in busiest
    assert not any(f"process {stranger.pid}," in name for name in found.threads)
    assert not any(f"process {os.getpid()}," in name for name in found.threads)  # it has the load
    assert found.machine > found.cluster > 0.5 * found.threads[busiest] > 0


def test_own_processes_count_children_that_have_ended_and_the_group_is_gone_afterwards() -> None:
    need_cgroups()
    with meter.OwnProcesses("ended-test") as own:
        before = own.used_s()
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
        assert own.used_s() - before >= 0.27
        assert {pid for pid, _ in own.threads()} == {os.getpid()}
    assert "ended-test" not in Path("/proc/self/cgroup").read_text()
    parents = filter(None, (meter._own_group("cgroup", "cpuacct"), meter._own_group("cgroup2", "")))
    assert not [folder for parent in parents for folder in parent.glob("*ended-test*")]
