"""What would not scale beyond a few cores: locks of the kernel and event loops, per call. Needs root and perf (linux-perf).

    python -m loadtest.bench.locks --page docs/results/large-node.md

perf samples all cores while the `redis` arm runs programs at saturation. A sample in a function that holds a lock, if only for
a part of its time, counts as time that the lock was held: the figures are upper bounds, but holders that sleep are not seen.
`lock:contention_begin` and `_end` give the time waited. From the time held per call follow the calls/s at which a lock is busy
half of the time, and how busy it is on a node of many cores. That part is computed.
"""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from loadtest.bench.arms import Arm, ArmFailed, open_arm
from loadtest.support import meter, results
from loadtest.support.results import EXIT_UNAVAILABLE
from loadtest.support.workload import MIXES, Workload
from worker.config import default_slots

MODULE = "loadtest.bench.locks"
SAMPLES_PER_S = 2999
WARM_UP_CALLS = 60
NODES = (16, 64, 96)  # cores
BUSY = 0.5
CONTENTION = ("lock:contention_begin", "lock:contention_end")
COUNTED = {
    "processes": "sched:sched_process_fork",
    "`unshare`": "syscalls:sys_enter_unshare",
    "`mount`": "syscalls:sys_enter_mount",
    "moves between control groups": "cgroup:cgroup_attach_task",
    "work items (cleaning up)": "workqueue:workqueue_execute_start",
}
# Functions during which a lock is held, and callees that run after its release. `of the zygote`: each zygote has its own.
LOCKS: list[tuple[str, str, str]] = [
    (
        "namespace_sem (mount namespaces)",
        r"copy_tree|umount_tree|do_lock_mount\S*|attach_recursive_mnt\S*|do_add_mount|do_umount|path_pivot_root|graft_tree",
        r"namespace_unlock",
    ),
    ("exp_mutex (RCU expedited)", r"synchronize_rcu_expedited|rcu_exp_\w+|exp_funnel_lock", ""),
    ("cgroup_mutex, cgroup_threadgroup_rwsem", r"__cgroup1?_procs_write\S*|cgroup_mkdir|cgroup_rmdir", r"get_task_cred"),
    (
        "css_set_lock",
        r"cgroup_post_fork|cgroup_exit|cgroup_migrate\w*|cgroup_task_\w+|cgroup_release|css_set_\w+|find_css_set|put_css_set\w*",
        "",
    ),
    ("tasklist_lock", r"_raw_write_(un)?lock_irq\w*|queued_write_lock_slowpath|wait_consider_task|exit_notify", ""),
    ("pidmap_lock (process ids)", r"alloc_pid|free_pids?", ""),
    ("sysctl_lock (sysctls of namespaces)", r"(__)?(un)?register_sysctl_table|insert_header|drop_sysctl_table|put_links", ""),
    (
        "shrinker_mutex, list_lrus_mutex (file systems)",
        r"shrinker_\w+|list_lru_destroy|__list_lru_init|memcg_\w*list_lru\w*",
        "",
    ),
    (
        "sb_lock (file systems)",
        r"sget\w*|kill_anon_super|put_super\S*|__put_super\S*|generic_shutdown_super",
        r"shrink_dcache\w+",
    ),
    ("pcpu_lock (per-CPU memory)", r"pcpu_alloc\w*|free_percpu|percpu_free_rwsem", ""),
    ("mount_lock", r"mntput_no_expire", r"cleanup_mnt|task_work_run"),
    ("pernet_ops_rwsem, rtnl (network namespaces)", r"setup_net|cleanup_net", ""),
    ("mmap_lock, of the zygote", r"dup_mmap", ""),
    ("anon_vma lock, of the zygote", r"anon_vma_fork|anon_vma_clone|unlink_anon_vmas", ""),
]
_LOCKS = [(name, re.compile(holds), re.compile(frees) if frees else None) for name, holds, frees in LOCKS]
OTHER = "run queues and other locks"
LOOPS = {" gateway": "gateway's event loop", " worker": "worker's event loop", "redis-server": "Redis", "valkey": "Redis"}
KTHREADD = 2  # the parent of all kernel threads
_FORKED = re.compile(r"PERF_RECORD_FORK\((\d+):\d+\):\((\d+):\d+\)")
_HEAD = re.compile(r"\s*(\d+)\s+([\d.]+):\s+([\w:-]+):")
_FRAME = re.compile(r"\s+[0-9a-f]+ (\S+?)(?:\+0x[0-9a-f]+)? \((.+)\)$")


class Event(NamedTuple):
    pid: int
    at_s: float
    name: str
    stack: list[str]  # functions of the kernel, the innermost first

    def locks(self) -> list[str]:
        """The locks that are held, or waited for."""
        found = []
        for name, holds, frees in _LOCKS:
            depth = next((at for at, frame in enumerate(self.stack) if holds.fullmatch(frame)), None)
            if depth is not None and not (frees and any(frees.match(frame) for frame in self.stack[:depth])):
                found.append(name)
        return found


class Found(NamedTuple):
    calls: int
    calls_per_s: float
    others_share: float  # of the cores, used by other processes
    cpu_ms: float  # per call, of all processes but the load's
    held_us: dict[str, float]  # per call
    waits: dict[str, float]  # per call
    waited_us: dict[str, float]  # per call
    loops_us: dict[str, float]  # CPU time per call of processes that have one thread
    objects: dict[str, float]  # per call


def read_events(lines: Iterable[str], ours: set[int]) -> Iterator[Event]:
    """From the output of `perf script -F pid,time,event,ip,sym,dso --show-task-events`, of these processes, of those that they
    start, and of kernel threads."""
    event: Event | None = None
    ours.add(KTHREADD)
    for line in lines:
        if forked := _FORKED.search(line):
            if int(forked[2]) in ours:
                ours.add(int(forked[1]))
        elif head := _HEAD.match(line):
            if event is not None and event.pid in ours:
                yield event
            event = Event(int(head[1]), float(head[2]), head[3], [])
        elif event is not None and (frame := _FRAME.match(line)) and "kernel" in frame[2]:
            event.stack.append(frame[1])
    if event is not None and event.pid in ours:
        yield event


@contextlib.contextmanager
def perf(*arguments: str) -> Iterator[None]:
    process = subprocess.Popen(["perf", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def loops_s(arm: Arm) -> dict[str, float]:
    """CPU time of the main threads of the service's single-threaded parts."""
    found: defaultdict[str, float] = defaultdict(float)
    for pid in meter.tree(arm.service_pid):
        command = meter.proc_text(pid, "cmdline").replace("\0", " ")
        if name := next((name for word, name in LOOPS.items() if word in command), ""):
            user, system = meter.proc_text(pid, f"task/{pid}/stat").rpartition(")")[2].split()[11:13]
            found[name] += (int(user) + int(system)) / 100
    return found


def measure(arm: Arm, calls: int, mix: str) -> Found:
    programs = Workload.own().calls(calls, 1, mix)
    arm.run(programs[:WARM_UP_CALLS], default_slots())
    with tempfile.TemporaryDirectory() as folder:
        data, counts, loops = f"{folder}/perf.data", f"{folder}/counts", loops_s(arm)
        ours = set(meter.tree(arm.service_pid))
        sampling = [part for event in CONTENTION for part in ("-e", event)]
        counting = [part for event in COUNTED.values() for part in ("-e", event)]
        with (
            perf("record", "-q", "-a", "-g", "-e", "cpu-clock", "-F", str(SAMPLES_PER_S), *sampling, "-o", data),
            perf("stat", "-a", "-x", ",", *counting, "-o", counts),
        ):
            run = arm.run(programs, default_slots())
        loops = {name: seconds - loops[name] for name, seconds in loops_s(arm).items()}
        script = ["perf", "script", "-i", data, "-F", "pid,time,event,ip,sym,dso", "--show-task-events"]
        with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace") as made:
            assert made.stdout is not None
            held, waits, waited = add_up(read_events(made.stdout, ours))
        objects = read_counts(Path(counts).read_text())
    held_names = [name for name, _, _ in LOCKS]
    return Found(
        calls,
        run.calls_per_s,
        run.others_share,
        run.cpu_ms,
        {name: 1e6 * held[name] / SAMPLES_PER_S / calls for name in held_names},
        {name: waits[name] / calls for name in (*held_names, OTHER)},
        {name: 1e6 * waited[name] / calls for name in (*held_names, OTHER)},
        {name: 1e6 * seconds / calls for name, seconds in loops.items()},
        {name: objects[event] / calls for name, event in COUNTED.items()},
    )


def add_up(events: Iterable[Event]) -> tuple[Counter[str], Counter[str], dict[str, float]]:
    """Samples that held each lock, waits for it, and seconds waited."""
    held, waits, waited = Counter[str](), Counter[str](), defaultdict[str, float](float)
    begun: dict[int, Event] = {}  # by process
    for event in events:
        if event.name not in CONTENTION:
            held.update(event.locks())
        elif event.name == CONTENTION[0]:
            begun.setdefault(event.pid, event)  # a mutex that spins first begins twice
        elif (begin := begun.pop(event.pid, None)) is not None:
            for name in begin.locks() or [OTHER]:
                waits[name] += 1
                waited[name] += event.at_s - begin.at_s
    return held, waits, waited


def read_counts(text: str) -> dict[str, int]:
    rows = [line.split(",") for line in text.splitlines() if line[:1].isdigit()]
    return {row[2]: int(row[0]) for row in rows}


def page(found: Found, about: dict[str, str]) -> str:
    nodes = {cores: 1000 * cores / found.cpu_ms for cores in NODES}  # calls/s with every core busy
    held = dict(sorted(found.held_us.items(), key=lambda one: -one[1]))
    rows = []
    for name, us in (held | dict(sorted(found.loops_us.items(), key=lambda one: -one[1]))).items():
        shared = "of the zygote" not in name
        busy = [f"{per_s * us / 1e4:.0f} %" if shared else "" for per_s in nodes.values()]
        waits = (f"{found.waits[name]:.2f}", f"{found.waited_us[name]:.1f}") if name in found.held_us else ("", "")
        rows.append([name, f"{us:.1f}", *waits, f"{BUSY * 1e6 / us:,.0f}" if us and shared else "", *busy])
    rows.append([OTHER, "", f"{found.waits[OTHER]:.2f}", f"{found.waited_us[OTHER]:.1f}", "", "", "", ""])
    head = ["lock or loop", "µs per call", "waits per call", "µs waited per call", "calls/s when half busy"]
    table = results.markdown([*head, *(f"busy on {cores} cores" for cores in NODES)], rows)
    sizes = [[f"{cores}", f"{per_s:,.0f}"] for cores, per_s in nodes.items()]
    capacity = results.markdown(["cores", "calls/s with every core busy"], sizes)
    objects = results.markdown(["", "per call"], [[name, f"{count:.2f}"] for name, count in found.objects.items()])
    rates = f"{found.calls_per_s:.0f} calls/s under perf, {found.cpu_ms:.2f} ms of CPU time per call"
    measured = f"{found.calls} calls, {rates}, others used {found.others_share:.0%} of the machine."
    return "\n\n".join(
        [
            Path(__file__).with_name("locks.txt").read_text().strip(),
            f"## Measured\n\n{measured} The last four columns, and the next table, are computed from the others.",
            table,
            capacity,
            "Created on the whole machine, per call:",
            objects,
            results.about_table(about),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = results.parser(MODULE, __doc__, page=True)
    parser.add_argument("--mix", choices=MIXES, default="std", help="(default %(default)s)")
    parser.add_argument("--calls", type=int, default=6000, help="(default %(default)s)")
    given = parser.parse_args(argv)
    if not results.is_root("locks"):
        return EXIT_UNAVAILABLE
    if not shutil.which("perf"):
        print("locks: needs perf; on Debian and Ubuntu: apt-get install linux-perf or linux-tools-generic", file=sys.stderr)
        return EXIT_UNAVAILABLE
    try:
        with open_arm("redis") as arm:
            found = measure(arm, given.calls, given.mix)
    except ArmFailed as error:
        print(f"locks: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    results.write_page(page(found, results.about(MODULE, argv)), given.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
