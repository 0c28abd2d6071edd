"""The soak judges by its criteria; at rest it counts the CPU time of its own processes."""

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
    about, rest, paces = {"cpu": "x"}, Rest(0.01, 0.02), [Pace(80.0, 0.8, True)]
    numbers = (100.0, 150.0, 160.0)
    injected = [Injected("kill", 10.0, 5.0)]
    found = Soak(about, 30.0, 100.0, 0.8, 1.0, rest, Counts(right=10), 180.0, *numbers, growth, injected, paces, [])
    return found._replace(**changes)


def test_a_soak_allows_its_cluster_2_percent_of_the_cores_at_rest() -> None:
    assert not soaked(rest=Rest(0.019, 0.6)).misses()
    [words] = soaked(rest=Rest(0.021, 0.0)).misses()
    assert "rest: cores 2.1 % busy" in words


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"counts": Counts(right=10, lost=1)}, "promise"),
        ({"last_p99_ms": 201.0}, "p99"),
        ({"busy": 0.7}, "load"),
        ({"beside_fresh": 0.8}, "speed"),
        ({"rest": Rest(0.5, 0.5)}, "rest"),
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
    if os.geteuid() != 0 or not (meter.own_group("cpuacct") or meter.own_group("")):
        pytest.skip("this needs root and control groups")


def test_rest_counts_an_orphan_and_leaves_other_processes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    need_cgroups()
    monkeypatch.setattr(soak, "REST_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", SPIN]) as stranger:
        try:
            with meter.own_processes("rest-test") as own_s:
                orphan = int(subprocess.check_output([sys.executable, "-c", ORPHAN]))
                try:
                    found = soak.look_at_rest(own_s)
                finally:
                    os.kill(orphan, signal.SIGKILL)
        finally:
            stranger.kill()
    assert found.machine > found.cluster > 0


def test_own_processes_count_children_that_have_ended_and_the_group_is_gone_afterwards() -> None:
    need_cgroups()
    with meter.own_processes("ended-test") as own_s:
        before = own_s()
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
        assert own_s() - before >= 0.27
    assert "ended-test" not in Path("/proc/self/cgroup").read_text()
    parents = filter(None, (meter.own_group("cpuacct"), meter.own_group("")))
    assert not [folder for parent in parents for folder in parent.glob("*ended-test*")]
