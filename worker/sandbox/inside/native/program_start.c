/* Starts a program: limits, namespaces, init stub or keeper, fork. */
#define _GNU_SOURCE
#include <Python.h>
#include "forking.h"
#include "huge_pages.h"
#include "session_members.h"
#include "supervisor.h"
#include "zygote.h"
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define FORKS_BEFORE_MENDING 500

void close_all(int *fd, int count) {
    for (int i = 0; i < count; i++) {
        if (fd[i] >= 0)
            close(fd[i]);
        fd[i] = -1;
    }
}

/* Each time: other zygotes use the slot too, and may have set other limits. */
static int write_limits(struct slot *s) {
    if (write_number(s->cgroup[CG_MEMORY_LIMIT], s->ask.memory_bytes) || write_number(s->cgroup[CG_PIDS_LIMIT], s->ask.processes))
        return -1;
    if (s->cgroup[CG_MEMORY_PEAK] >= 0)
        write_number(s->cgroup[CG_MEMORY_PEAK], 0); /* resets it, where the kernel can */
    return 0;
}

static int apply_limits(struct slot *s) {
    if (read_number(s->cgroup[CG_PIDS_NOW]) > 0) { /* what a lost zygote left here is still dying */
        errno = EBUSY;
        return -1;
    }
    s->ooms_before = read_ooms(s); /* cumulative, and other zygotes use the slot too */
    return house.layers & LAYER_PIDNS ? write_limits(s) : 0; /* else the keeper does, when the slot's folder is empty */
}

/* In a process that is in none of the slot's control groups: what the last program left would count as the next one's. */
static pid_t clear_and_keep(struct slot *s) {
    struct progress *progress = &house.progress[s - book->slots];
    if (clear_folder(&house, s) || write_limits(s)) {
        progress->error = errno;
        _exit(EXIT_NOT_CONFINED);
    }
    progress->cleared_ns = now_ns();
    return keep(progress, s->cgroup[CG_PIDS_LIMIT]);
}

/* Both the stub and the child are made in a new PID and mount namespace; then the zygote and its later children are in its own
 * again. */
static pid_t start_stub_and_fork(struct slot *s) {
    s->stub = 0;
    if (!(house.layers & LAYER_PIDNS)) {
        pid_t keeper = fork();
        return keeper ? keeper : clear_and_keep(s);
    }
    int mounts = house.layers & LAYER_MOUNTS ? CLONE_NEWNS : 0;
    if ((!s->stub_stack && !(s->stub_stack = new_stack())) || unshare(CLONE_NEWPID | mounts))
        return -1;
    pid_t child = -1;
    s->stub = clone(stub_main, s->stub_stack + STACK_BYTES, CLONE_VM | SIGCHLD, (void *)(intptr_t)s->uid);
    if (s->stub > 0)
        child = fork_alone();
    if (child == 0)
        return 0;
    int error = errno;
    if (setns(own_pidns_fd, CLONE_NEWPID) || (mounts && setns(own_mntns_fd, CLONE_NEWNS)))
        _exit(1); /* cannot go on: every later child would land in this program's namespaces */
    if (child > 0)
        return child;
    if (s->stub > 0) {
        kill(s->stub, SIGKILL);
        waitpid(s->stub, NULL, __WALL);
    }
    errno = error;
    return -1;
}

/* In the child. Returns the mapped page, or does not return. */
static void *become_program(struct slot *s, int index) {
    void *page = NULL;
    sigprocmask(SIG_SETMASK, &python_signals, NULL);
    if (confine(&house, s, index, &page))
        _exit(EXIT_NOT_CONFINED);
    own_progress = &house.progress[index];
#if PY_VERSION_HEX >= 0x030C0000
    PyOS_BeforeFork(); /* takes the locks that the other gives back; nobody else is here to want them */
    PyOS_AfterFork_Child();
#endif /* 3.11's only renews locks, none of which is held here, and runs hooks; program.py does what is needed of them (-0.7 ms) */
    return page;
}

/* Where control groups count, nothing has to be done for a session between two requests. */
int is_watched(struct slot *s) { return !s->is_session || !(house.layers & LAYER_CGROUP); }

void *start(struct ask *ask, int *fd) {
    struct slot *s = &book->slots[ask->slot];
    s->ask = *ask;
    memcpy(s->fd, fd, sizeof s->fd);
    for (int i = FD_STDIN, next = FD_STDIN; i < RUN_FDS; i++) /* those that are not there left no gap */
        s->fd[i] = ask->flags >> (i - FD_STDIN) & 1 ? fd[next++] : -1;
    s->is_session = s->fd[FD_CONTROL] >= 0;
    s->child_reaped = s->stub_reaped = 0;
    s->ended_by = BY_ITSELF;
    s->status = s->cpu_ns = s->ended_ns = 0;
    s->processes_peak = 1;
    house.progress[ask->slot] = (struct progress){.step = -1};
    s->forked_ns = now_ns();
    s->due_ns = s->is_session ? INT64_MAX : s->forked_ns + (ask->wall_ns < ask->deadline_ns ? ask->wall_ns : ask->deadline_ns);
    meter_start(&s->meter, s->cgroup[CG_CPU_USAGE], s->forked_ns);
    pid_t child = take_network(s) || apply_limits(s) ? -1 : start_stub_and_fork(s);
    if (child == 0)
        return become_program(s, (int)ask->slot);
    if (child < 0) {
        say_not_started(ask, -1, errno);
        give_back_network(s);
        close_all(s->fd, RUN_FDS);
        return NULL;
    }
    s->child = child;
    if (++book->forks % FORKS_BEFORE_MENDING == 0)
        heap_mend();
    if (!s->stub)
        s->stub_reaped = 1;
    s->state = SLOT_RUNNING;
    book->running += is_watched(s);
    close_all(&s->fd[FD_PAGE], RUN_FDS - FD_PAGE); /* but not what is watched: the outputs */
    if (s->is_session) {
        close_all(s->fd, RUN_FDS); /* the worker looks at the output of each cell itself */
        if (!member_add((int)ask->slot, ask->member, child))
            end(s, BY_REQUEST);
    }
    return NULL;
}
