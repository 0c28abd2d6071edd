/* Ends a program, reaps its processes and reports what the kernel measured. */
#define _GNU_SOURCE
#include "raw.h"
#include "session_members.h"
#include "zygote.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>

void end(struct slot *s, int by) {
    if (s->state != SLOT_RUNNING)
        return;
    s->state = SLOT_ENDING;
    s->ended_by = by;
    sample_processes(s);
    if (by == BY_ITSELF && s->stub && let_leave(s))
        s->stub_reaped = 1; /* nobody waits for it */
    else if (s->stub)
        kill(s->stub, SIGKILL);
    else
        kill(s->child, SIGTERM); /* the keeper kills what it keeps */
}

static void finish(struct slot *s) {
    struct progress *p = &house.progress[s - book->slots];
    int64_t ready = p->ready_ns ? p->ready_ns : s->ended_ns;
    struct ooms ooms = read_ooms(s);
    struct say message = {
        .kind = SAY_ENDED, .slot = s - book->slots, .call = s->ask.call,
        .step = p->ready_ns ? 0 : (p->step ? p->step : -1), .error = p->error,
        .status = s->status, .ended_by = s->ended_by,
        .start_ns = ready - s->forked_ns, .run_ns = s->ended_ns - ready, .cpu_ns = s->cpu_ns,
        .memory_peak = read_number(s->cgroup[CG_MEMORY_PEAK]),
        .oom_kills = ooms.kills - s->ooms_before.kills, .processes_peak = s->processes_peak,
        .starved_ns = s->meter.starved_ns, .oom_by = oom_by(s->ooms_before, ooms),
    };
    close_all(s->fd, RUN_FDS);
    give_back_network(s);
    book->running -= is_watched(s);
    s->state = SLOT_FREE;
    if (s->is_session) { /* its place is made known anew, perhaps to another zygote */
        close_all(s->cgroup, SLOT_FDS);
        s->state = SLOT_UNKNOWN;
    }
    say(&message);
}

/* The keeper is gone, and with it all that it kept; it has written down how. */
static void note_keeper(struct slot *s) {
    struct progress *p = &house.progress[s - book->slots];
    s->child_reaped = 1;
    s->state = SLOT_ENDING;
    s->status = p->status;
    s->cpu_ns = p->cpu_ns;
    s->forked_ns = p->cleared_ns ? p->cleared_ns : s->forked_ns;
    s->ended_ns = p->ended_ns ? p->ended_ns : now_ns();
    if ((s->ended_by == BY_WALL || s->ended_by == BY_DEADLINE) && p->ended_ns && p->ended_ns < s->due_ns)
        s->ended_by = BY_ITSELF; /* in time; what it left took longer to kill */
    if (!p->ended_ns)
        p->ready_ns = 0; /* killed from outside: nobody knows what became of the program */
}

static void note_child(struct slot *s, int status, struct rusage *u) {
    s->child_reaped = 1;
    s->status = status;
    s->ended_ns = now_ns();
    s->cpu_ns = cpu_ns_of(u);
    if (!s->is_session || !house.progress[s - book->slots].ready_ns)
        end(s, BY_ITSELF); /* takes its daemons with it */
}

/* One process of a session is gone, with what it left behind. The others go on. */
static void note_member(struct member *m, int status, struct rusage *u) {
    struct slot *s = &book->slots[m->slot];
    struct ooms ooms = read_ooms(s);
    struct say message = {
        .kind = SAY_MEMBER_ENDED, .slot = m->slot, .call = m->number, .cpu_ns = cpu_ns_of(u),
        .status = s->stub ? status : house.progress[m->slot].status,
        .memory_peak = read_number(s->cgroup[CG_MEMORY_PEAK]), .oom_kills = ooms.kills - s->ooms_before.kills,
        .ended_by = s->ended_by, .processes_peak = 1, .oom_by = oom_by(s->ooms_before, ooms),
    };
    s->ooms_before = ooms;
    member_forget(m);
    say(&message);
}

static int is_over(struct slot *s) { return s->child_reaped && s->stub_reaped && !(s->is_session && members_of((int)(s - book->slots))); }

void reap(void) {
    struct signalfd_siginfo info;
    while (raw4(SYS_read, signal_fd, (long)&info, sizeof info, 0) > 0)
        ;
    int status;
    struct rusage usage;
    pid_t pid;
    while ((pid = (pid_t)raw4(SYS_wait4, -1, (long)&status, __WALL | WNOHANG, (long)&usage)) > 0) {
        if (has_left(pid))
            continue;
        struct member *member = member_by_pid(pid);
        int member_slot = member ? member->slot : -1;
        for (int i = 0; i < book->slots_known; i++) {
            struct slot *s = &book->slots[i];
            if (s->state != SLOT_RUNNING && s->state != SLOT_ENDING)
                continue;
            if (pid == s->child && !s->child_reaped && s->stub)
                note_child(s, status, &usage);
            else if (pid == s->child && !s->child_reaped)
                note_keeper(s);
            else if (pid == s->stub)
                s->stub_reaped = 1;
            else if (i != member_slot)
                continue;
            if (i == member_slot)
                note_member(member, status, &usage);
            if (is_over(s))
                finish(s);
            break;
        }
    }
}
