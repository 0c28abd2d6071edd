"""The profile of a call: whose process a sample is, what kind of work it shows, and a small run with the real perf."""

import os
import re
from pathlib import Path

import pytest
from common import need_root_and_nsjail, unavailable

from loadtest.bench import profile
from loadtest.support import perf

SCRIPT = """\
    0 PERF_RECORD_FORK(2:2):(0:0)
    0 PERF_RECORD_FORK(9:9):(2:2)
    0 PERF_RECORD_FORK(100:100):(1:1)
    0 PERF_RECORD_FORK(100:101):(100:100)
   77 PERF_RECORD_FORK(200:200):(100:100)
  200 PERF_RECORD_COMM: python:200/200
  200 PERF_RECORD_FORK(201:201):(200:200)
  201
\tffffffff815f29a5 unmap_page_range ([kernel.kallsyms])
\tffffffff815f29a6 exit_mmap ([kernel.kallsyms])
\tffffffff815f29a7 do_exit ([kernel.kallsyms])

  200
\tffffffff815f3283 copy_page_range ([kernel.kallsyms])
\tffffffff81356614 kernel_clone ([kernel.kallsyms])
\t    14a4d9b82a2a [unknown] (/memfd:x (deleted))

  200
\t    14a4d9b82a2a PyObject_Malloc (/usr/bin/python3)

    9
\tffffffff81356614 rcu_gp_kthread ([kernel.kallsyms])

  300
\tffffffff81356614 do_exit ([kernel.kallsyms])

"""
ZYGOTE = {100: "zygote", 300: profile.LOAD}


def count(script: str, known: dict[int, str]) -> profile.Profile:
    return profile.count(perf.read(script.splitlines(keepends=True)), known, 1, 2.0)


def test_what_a_zygote_forked_is_a_program_with_all_its_descendants() -> None:
    found = count(SCRIPT, ZYGOTE)
    kinds = {"exit and reaping", "fork", profile.USER}
    assert {kind for role, kind in found.samples if role == profile.PROGRAMS} == kinds
    assert found.sampled_ms == pytest.approx(3 * 1000 / perf.SAMPLES_PER_S)


def test_kernel_threads_are_counted_apart_and_the_load_not_at_all() -> None:
    found = count(SCRIPT, ZYGOTE)
    assert set(found.samples) - {key for key in found.samples if key[0] == profile.PROGRAMS} == {
        (profile.KERNEL_THREADS, "RCU")
    }
    assert found.others_share == 0


def test_process_outside_of_the_arm_is_only_a_share() -> None:
    found = count(SCRIPT, {300: "worker"})
    assert {role for role, _ in found.samples} == {"worker", profile.KERNEL_THREADS}
    assert found.others_share == pytest.approx(3 / 5)


def test_table_adds_up_by_process_and_by_kind() -> None:
    rows = [re.findall(r"[\d.]+", line) for line in profile.table(count(SCRIPT, ZYGOTE)).splitlines()[2:]]
    one = 1000 / perf.SAMPLES_PER_S
    assert [float(cell) for cell in rows[-1]] == pytest.approx([3 * one, one, 4 * one], abs=0.002)
    assert sum(float(row[-1]) for row in rows[:-1]) == pytest.approx(4 * one, abs=0.005)


def test_without_perf_it_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setenv("PATH", "/none")
    assert profile.main([]) == 69
    assert "apt-get install linux-perf" in capsys.readouterr().err


def test_perf_that_cannot_sample_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "perf").write_text("#!/bin/sh\necho 'Access to performance monitoring is limited.'\nexit 255\n")
    (tmp_path / "perf").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(perf.PerfFailed, match="monitoring is limited"), perf.recording(tmp_path / "data"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["zygote", "redis"])
def test_real_profile_finds_the_work_of_the_sandbox(arm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_root_and_nsjail()
    try:
        perf.check()
    except perf.PerfFailed as failed:
        unavailable(str(failed))
    page = tmp_path / "profile.md"
    assert profile.main(["--arms", arm, "--mix", "std", "--calls", "60", "--page", str(page)]) == 0, capsys.readouterr()
    text = page.read_text()
    for word in ("programs", "zygote", "worker", "| fork |", "| page faults |", "| exit and reaping |"):
        assert word in text
    found = re.search(r"threads: ([\d.]+) ms per call; .* counted ([\d.]+\d)\.", text)
    assert found is not None
    assert 0.7 < float(found[1]) / float(found[2]) < 1.4
