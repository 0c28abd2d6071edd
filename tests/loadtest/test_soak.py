"""The soak judges by its criteria; at rest it counts the cluster's own CPU time and names the busiest thread."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.chaos import soak
from loadtest.chaos.soak import Injected, Pace, Rest, Soak, visits_of
from loadtest.support import meter
from loadtest.support.steady_load import Counts

SPIN = "while True: pass"
ORPHAN = f"import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SPIN!r}], stdout=subprocess.DEVNULL).pid)"


def soaked(**changes: object) -> Soak:
    growth = {"gateway": (0.02, 10**6), "worker": (0.0, 0), "redis": (0.3, 10**6)}
    about, rest, paces = {"cpu": "x"}, Rest(0.01, 0.02, {}), [Pace(80.0, 0.8, True)]
    numbers = (100.0, 150.0, 160.0)
    injected = [Injected("kill", 10.0, 5.0)]
    found = Soak(about, 30.0, 100.0, 0.8, 1.0, rest, Counts(right=10), 180.0, *numbers, growth, injected, paces, [])
    return found._replace(**changes)


def test_a_soak_allows_its_cluster_2_percent_of_the_cores_at_rest_and_names_the_busiest_thread() -> None:
    assert not soaked(rest=Rest(0.019, 0.6, {})).misses()
    [words] = soaked(rest=Rest(0.021, 0.0, {})).misses()
    assert "rest: cores 2.1 % busy" in words
    [words] = soaked(rest=Rest(0.5, 0.5, {"a worker's thread": 0.49})).misses()
    assert "a worker's thread: 49.0 %" in words


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"counts": Counts(right=10, lost=1)}, "promise"),
        ({"last_p99_ms": 201.0}, "p99"),
        ({"busy": 0.7}, "load"),
        ({"beside_fresh": 0.8}, "speed"),
        ({"rest": Rest(0.5, 0.5, {})}, "rest"),
        ({"growth": {"gateway": (0.2, 10**8)}}, "memory of the gateway"),
    ],
)
def test_a_soak_is_good_only_if_nothing_is_lost_and_all_is_flat(changes: dict[str, object], word: str) -> None:
    missed = soaked(**changes).misses()
    assert missed == [] if not word else (len(missed) == 1 and word in missed[0])
    assert ("All criteria met" in soak.page(soaked(**changes))) is not bool(word)


@pytest.mark.parametrize(("busy_per_call", "wanted"), [(0.01, 80.0), (0.016, 50.0), (0.004, 200.0)])
def test_the_load_of_a_soak_goes_where_the_cores_are_as_busy_as_they_should_be(busy_per_call: float, wanted: float) -> None:
    per_s = 100.0
    for _ in range(60):
        per_s = soak.next_pace(per_s, min(1.0, per_s * busy_per_call))
    assert per_s == pytest.approx(wanted, rel=0.02)


def test_a_call_is_in_calm_unless_a_fault_touched_its_stay() -> None:
    injected = [Injected("kill", 10.0, 5.0)]
    calm = [visit.calm for visit in visits_of([1.0, 9.5, 12.0, 16.0], [0.1, 1.0, 0.1, 0.1], injected)]
    assert calm == [True, False, False, True]


def need_cgroups() -> None:
    if os.geteuid() != 0 or not (meter.own_group("cgroup", "cpuacct") or meter.own_group("cgroup2", "")):
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
    assert not any(f"process {os.getpid()}," in name for name in found.threads)  # has the load
    assert found.machine > found.cluster > 0.5 * found.threads[busiest] > 0


def test_own_processes_count_children_that_have_ended_and_the_group_is_gone_afterwards() -> None:
    need_cgroups()
    with meter.OwnProcesses("ended-test") as own:
        before = own.used_s()
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
        assert own.used_s() - before >= 0.27
        assert {pid for pid, _ in own.threads()} == {os.getpid()}
    assert "ended-test" not in Path("/proc/self/cgroup").read_text()
    parents = filter(None, (meter.own_group("cgroup", "cpuacct"), meter.own_group("cgroup2", "")))
    assert not [folder for parent in parents for folder in parent.glob("*ended-test*")]
