/* Ends a program, reaps its processes and reports what the kernel measured. */
#include "zygote.h"
#include <sys/signalfd.h>

void end_program(struct slot *s, int by) {
    if (s->state != SLOT_RUNNING)
        return;
    s->state = SLOT_ENDING;
    s->ended_by = by;
    sample_processes(s);
    if (by == BY_ITSELF && s->stub && let_stub_linger(s))
        s->stub_reaped = 1; /* the zygote does not wait for it */
    else if (s->stub)
        kill(s->stub, SIGKILL);
    else
        kill(s->child, SIGTERM); /* the supervisor kills its program */
}

static void finish_program(struct slot *s) {
    struct progress *p = &config.progress[s - loop->slots];
    int64_t ready = p->ready_ns ? p->ready_ns : s->ended_ns;
    struct oom_counts oom_counts = read_oom_counts(s);
    struct report message = {
        .kind = REPORT_ENDED, .slot = s - loop->slots, .call = s->request.call,
        .step = p->ready_ns ? 0 : (p->step ? p->step : -1), .error = p->error,
        .status = s->status, .ended_by = s->ended_by,
        .start_ns = ready - s->forked_ns, .run_ns = s->ended_ns - ready, .cpu_ns = s->cpu_ns,
        .memory_peak = read_number(s->cgroup[CG_MEMORY_PEAK]),
        .oom_kills = oom_counts.kills - s->oom_counts_before.kills, .processes_peak = s->processes_peak,
        .starved_ns = s->meter.starved_ns, .oom_by = oom_by(s->oom_counts_before, oom_counts),
    };
    close_all(s->fd, RUN_FDS);
    give_back_network(s);
    loop->running -= is_watched(s);
    s->state = SLOT_FREE;
    if (s->is_session) { /* the worker registers the slot again, perhaps with another zygote */
        close_all(s->cgroup, SLOT_FDS);
        s->state = SLOT_UNKNOWN;
    }
    send_report(&message);
}

/* The supervisor ended, after all of its program's processes. It wrote the outcome into `progress`. */
static void note_supervisor_end(struct slot *s) {
    struct progress *p = &config.progress[s - loop->slots];
    s->child_reaped = 1;
    s->state = SLOT_ENDING;
    s->status = p->status;
    s->cpu_ns = p->cpu_ns;
    s->forked_ns = p->cleared_ns ? p->cleared_ns : s->forked_ns;
    s->ended_ns = p->ended_ns ? p->ended_ns : now_ns();
    if ((s->ended_by == BY_WALL || s->ended_by == BY_DEADLINE) && p->ended_ns && p->ended_ns < s->due_ns)
        s->ended_by = BY_ITSELF; /* it ended in time; killing its remaining processes took longer */
    if (!p->ended_ns)
        p->ready_ns = 0; /* the supervisor was killed from outside: the program's outcome is unknown */
}

static void note_child_end(struct slot *s, int status, struct rusage *u) {
    s->child_reaped = 1;
    s->status = status;
    s->ended_ns = now_ns();
    s->cpu_ns = cpu_ns_of(u);
    if (!s->is_session || !config.progress[s - loop->slots].ready_ns)
        end_program(s, BY_ITSELF); /* kills the daemons that it left */
}

/* One process of a session ended, with the processes that it started. The others continue. */
static void note_member_end(struct member *m, int status, struct rusage *u) {
    struct slot *s = &loop->slots[m->slot];
    struct oom_counts oom_counts = read_oom_counts(s);
    struct report message = {
        .kind = REPORT_MEMBER_ENDED, .slot = m->slot, .call = m->number, .cpu_ns = cpu_ns_of(u),
        .status = s->stub ? status : config.progress[m->slot].status,
        .memory_peak = read_number(s->cgroup[CG_MEMORY_PEAK]), .oom_kills = oom_counts.kills - s->oom_counts_before.kills,
        .ended_by = s->ended_by, .processes_peak = 1, .oom_by = oom_by(s->oom_counts_before, oom_counts),
    };
    s->oom_counts_before = oom_counts;
    member_forget(m);
    send_report(&message);
}

static int is_over(struct slot *s) {
    pid_t any;
    return s->child_reaped && s->stub_reaped && !(s->is_session && member_pids((int)(s - loop->slots), &any, 1));
}

void reap(void) {
    struct signalfd_siginfo info;
    while (raw4(SYS_read, loop->signal_fd, (long)&info, sizeof info, 0) > 0)
        ;
    int status;
    struct rusage usage;
    pid_t pid;
    while ((pid = (pid_t)raw4(SYS_wait4, -1, (long)&status, __WALL | WNOHANG, (long)&usage)) > 0) {
        if (reap_lingering_stub(pid))
            continue;
        struct member *member = member_by_pid(pid);
        int member_slot = member ? member->slot : -1;
        for (int i = 0; i < loop->slots_known; i++) {
            struct slot *s = &loop->slots[i];
            if (s->state != SLOT_RUNNING && s->state != SLOT_ENDING)
                continue;
            if (pid == s->child && !s->child_reaped && s->stub)
                note_child_end(s, status, &usage);
            else if (pid == s->child && !s->child_reaped)
                note_supervisor_end(s);
            else if (pid == s->stub)
                s->stub_reaped = 1;
            else if (i != member_slot)
                continue;
            if (i == member_slot)
                note_member_end(member, status, &usage);
            if (is_over(s))
                finish_program(s);
            break;
        }
    }
}
