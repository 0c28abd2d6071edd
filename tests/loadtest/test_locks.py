"""Time that kernel locks are held and waited for, from what perf prints."""

import pytest

from loadtest.bench.locks import OTHER, Found, add_up, page, read_counts, read_events

TEXT = """\
    0     0.000000: PERF_RECORD_FORK(40:40):(2:2)
 1000     0.000000: PERF_RECORD_FORK(2000:2000):(1000:1000)
 2000     1.000000:  cpu-clock:
\tffffffff81000000 clone_mnt+0x10 ([kernel.kallsyms])
\tffffffff81000001 copy_tree ([kernel.kallsyms])
\t          1af857 main+0x37 (/usr/bin/python3)

 2000     1.100000:  cpu-clock:
\tffffffff81000000 _raw_spin_unlock_irq ([kernel.kallsyms])
\tffffffff81000001 cgroup_migrate_execute ([kernel.kallsyms])
\tffffffff81000002 cgroup_attach_task ([kernel.kallsyms])
\tffffffff81000003 __cgroup1_procs_write.isra.0 ([kernel.kallsyms])

   40     1.200000:  cpu-clock:
\tffffffff81000000 free_percpu ([kernel.kallsyms])

 3000     1.300000:  cpu-clock:
\tffffffff81000001 copy_tree ([kernel.kallsyms])

 2000     2.000000: lock:contention_begin:
\tffffffff81000000 __mutex_lock.constprop.0 ([kernel.kallsyms])
\tffffffff81000001 synchronize_rcu_expedited ([kernel.kallsyms])

 2000     2.000100: lock:contention_begin:
\tffffffff81000001 synchronize_rcu_expedited ([kernel.kallsyms])

 2000     2.000500:   lock:contention_end:
\tffffffff81000001 synchronize_rcu_expedited ([kernel.kallsyms])

 2000     3.000000: lock:contention_begin:
\tffffffff81000000 try_to_wake_up ([kernel.kallsyms])

 2000     3.000002:   lock:contention_end:
"""


def test_samples_and_waits_of_our_processes_count_for_the_locks_in_their_stacks() -> None:
    held, waits, waited = add_up(read_events(TEXT.splitlines(), {1000}))
    assert held == {
        "namespace_sem (mount namespaces)": 1,
        "cgroup_mutex, cgroup_threadgroup_rwsem": 1,
        "css_set_lock": 1,
        "pcpu_lock (per-CPU memory)": 1,  # by a kernel thread
    }
    assert waits == {"exp_mutex (RCU expedited)": 1, OTHER: 1}
    assert waited["exp_mutex (RCU expedited)"] == pytest.approx(500e-6)
    assert waited[OTHER] == pytest.approx(2e-6)


def test_the_bound_of_a_lock_follows_from_its_time_per_call() -> None:
    lock, loop = "pidmap_lock (process ids)", "worker's event loop"
    waits = {lock: 0.25, OTHER: 1.0}
    found = Found(1000, 400.0, 0.1, 2.5, {lock: 50.0}, waits, waits, {loop: 500.0}, {"processes": 2.0})
    text = page(found, {"cores": "2"})
    assert f"| {lock} | 50.0 | 0.25 | 0.2 | 10,000 | 32 % | 128 % | 192 % |" in text  # 16 cores: 6,400 calls/s
    assert f"| {loop} | 500.0 |  |  | 1,000 | 320 % | 1280 % | 1920 % |" in text
    assert "| 64 | 25,600 |" in text


def test_counts_of_events_are_read_by_name() -> None:
    assert read_counts("# started\n\n1234,,sched:sched_process_fork,5,100.00,,\n") == {"sched:sched_process_fork": 1234}
