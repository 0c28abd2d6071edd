/* Requests about the members of a session. */
#define _GNU_SOURCE
#include "session_members.h"
#include "watchdog.h"
#include "zygote.h"
#include <errno.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

/* The fork that said hello; it has to be a child of ours that nobody has yet. */
static struct member *learn_fork(struct ask *ask, int hello_fd) {
    int64_t uid = -1;
    pid_t pid = sender_of_hello(hello_fd, &uid);
    if (pid < 0 || member_by_pid(pid) || leaver_by_pid(pid) || (house.layers & LAYER_UID && uid != book->slots[ask->slot].uid)) {
        errno = ESRCH;
        return NULL;
    }
    for (int i = 0; i < book->slots_known; i++)
        if (book->slots[i].state > SLOT_FREE && (book->slots[i].child == pid || book->slots[i].stub == pid)) {
            errno = ESRCH;
            return NULL;
        }
    return member_add((int)ask->slot, ask->member, pid);
}

/* Where there is no PID namespace, a session's process is the child of its keeper. */
static pid_t program_of(struct member *m) { return book->slots[m->slot].stub ? m->pid : first_child(m->pid); }

/* ASK_MEMBER */
static void adopt(struct ask *ask, int *fd) {
    struct slot *s = &book->slots[ask->slot];
    struct say answer = {.kind = SAY_MEMBER, .slot = ask->slot, .call = ask->member};
    int has_hello = ask->flags & HAS_HELLO, has_leaf = ask->flags & HAS_LEAF, *leaf = &fd[has_hello ? 1 : 0];
    errno = ESRCH;
    struct member *m = NULL;
    if (s->state == SLOT_RUNNING && s->is_session && s->ask.call == ask->call)
        m = has_hello ? learn_fork(ask, fd[0]) : member_by_number(ask->member);
    if (!m || (has_leaf && member_enter_leaf(m, program_of(m), leaf, (int)ask->flags)))
        answer.error = errno ? errno : EINVAL;
    if (has_hello)
        close(fd[0]);
    if (!m && has_leaf)
        close_all(leaf, LEAF_FDS);
    if (m && answer.error)
        member_kill(m);
    say(&answer);
}

/* How long a session's process has starved in its cell. */
static int64_t look_at_member(struct member *m, int64_t now) {
    if (m->leaf_usage >= 0)
        return meter_group(&m->meter, m->leaf_usage, m->leaf_threads, &m->known, now);
    return meter_one(&m->meter, program_of(m), m->pid, book->slots[m->slot].stub ? 0 : 1, now);
}

static void begin_cell(struct member *m) {
    if (m->leaf_usage < 0) {
        meter_start_one(&m->meter, program_of(m), now_ns());
        return;
    }
    meter_start(&m->meter, m->leaf_usage, now_ns());
    meter_know(&m->known, m->leaf_threads);
}

static void say_usage(struct member *m) {
    struct slot *s = &book->slots[m->slot];
    clockid_t clock;
    struct timespec used = {0};
    if (!clock_getcpuclockid(m->pid, &clock))
        clock_gettime(clock, &used);
    say(&(struct say){.kind = SAY_USAGE, .slot = m->slot, .call = m->number,
                      .cpu_ns = (int64_t)used.tv_sec * 1000000000LL + used.tv_nsec,
                      .starved_ns = look_at_member(m, now_ns()),
                      .memory_peak = read_number(s->cgroup[CG_MEMORY_PEAK]),
                      .processes_peak = read_number(s->cgroup[CG_PIDS_NOW])});
}

void obey_about_member(struct ask *ask, int *fd) {
    if (ask->kind == ASK_MEMBER) {
        adopt(ask, fd);
        return;
    }
    if (ask->kind == ASK_PROCESSES) {
        struct slot *s = &book->slots[ask->slot];
        if (s->state == SLOT_RUNNING && s->is_session && s->ask.call == ask->call)
            write_number(s->cgroup[CG_PIDS_LIMIT], ask->processes);
        return;
    }
    struct member *m = member_by_number(ask->member);
    if (!m || m->slot != ask->slot)
        return; /* it has ended, and that was said */
    int is_keeper = !book->slots[m->slot].stub;
    if (ask->kind == ASK_INTERRUPT) {
        pid_t pid = program_of(m);
        if (pid > 0)
            kill(pid, SIGINT);
    } else if (ask->kind == ASK_END_MEMBER && is_keeper)
        end(&book->slots[m->slot], BY_REQUEST);
    else if (ask->kind == ASK_END_MEMBER)
        member_kill(m);
    else if (ask->flags & USAGE_BEGIN)
        begin_cell(m);
    else
        say_usage(m);
}
