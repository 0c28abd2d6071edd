/* Starts a program: limits, namespaces, init stub or supervisor, then the fork. */
#include <Python.h>
#include "zygote.h"

#define FORKS_PER_COLLAPSE 500

void close_all(int *fd, int count) {
    for (int i = 0; i < count; i++) {
        if (fd[i] >= 0)
            close(fd[i]);
        fd[i] = -1;
    }
}

/* One network namespace for each running program: abstract socket names are per network namespace, so no two programs can
 * meet. */
static int new_network(void) {
    if (unshare(CLONE_NEWNET))
        return -1;
    int network = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (setns(loop->own_netns_fd, CLONE_NEWNET))
        _exit(1); /* fail closed: this process would stay in a program's namespace */
    return network;
}

static int take_network(struct slot *s) {
    s->network = -1;
    if (!(config.layers & LAYER_MOUNTS))
        return 0;
    s->network = loop->networks_idle ? loop->networks[--loop->networks_idle] : new_network();
    return s->network < 0 ? -1 : 0;
}

/* A socket outlives its program while it is in flight (SCM_RIGHTS), for example to itself. The next program would see its
 * name. */
static int has_no_sockets(int network) {
    char text[256];
    if (setns(network, CLONE_NEWNET))
        return 0;
    int fd = open("/proc/self/net/unix", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text);
    if (fd >= 0)
        close(fd);
    if (setns(loop->own_netns_fd, CLONE_NEWNET))
        _exit(1);
    return n > 0 && memchr(text, '\n', (size_t)n) == text + n - 1; /* only the header line */
}

void give_back_network(struct slot *s) {
    if (s->network >= 0 && loop->networks_idle < MAX_IDLE_NETWORKS && has_no_sockets(s->network))
        loop->networks[loop->networks_idle++] = s->network;
    else if (s->network >= 0)
        close(s->network);
    s->network = -1;
}

/* For every program: other zygotes use the slot too and may have set other limits. */
static int write_limits(struct slot *s) {
    if (write_number(s->cgroup[CG_MEMORY_LIMIT], s->request.memory_bytes) ||
        write_number(s->cgroup[CG_PIDS_LIMIT], s->request.processes))
        return -1;
    if (s->cgroup[CG_MEMORY_PEAK] >= 0)
        write_number(s->cgroup[CG_MEMORY_PEAK], 0); /* resets the peak where the kernel supports it */
    return 0;
}

static int apply_limits(struct slot *s) {
    if (read_number(s->cgroup[CG_PIDS_NOW]) > 0) { /* processes of a lost zygote are still dying here */
        errno = EBUSY;
        return -1;
    }
    s->oom_counts_before = read_oom_counts(s); /* the counters are cumulative, and other zygotes use the slot too */
    return config.layers & LAYER_PIDNS ? write_limits(s) : 0; /* else the supervisor does, when the slot's folder is empty */
}

/* Runs outside the slot's control groups: files of the last program would otherwise count for the next one. */
static pid_t clear_and_supervise(struct slot *s) {
    struct progress *progress = &config.progress[s - loop->slots];
    if (clear_folder(s) || write_limits(s)) {
        progress->error = errno;
        _exit(EXIT_NOT_CONFINED);
    }
    progress->cleared_ns = now_ns();
    return supervise(progress, s->cgroup[CG_PIDS_LIMIT]);
}

/* Creates the stub and the child in a new PID and mount namespace, then returns the zygote to its own. */
static pid_t start_stub_and_fork(struct slot *s) {
    s->stub = 0;
    if (!(config.layers & LAYER_PIDNS)) {
        pid_t supervisor = fork();
        return supervisor ? supervisor : clear_and_supervise(s);
    }
    int mounts = config.layers & LAYER_MOUNTS ? CLONE_NEWNS : 0;
    if ((!s->stub_stack && !(s->stub_stack = new_stack())) || unshare(CLONE_NEWPID | mounts))
        return -1;
    pid_t child = -1;
    s->stub = clone(stub_main, s->stub_stack + STACK_BYTES, CLONE_VM | SIGCHLD, (void *)(intptr_t)s->uid);
    if (s->stub > 0)
        child = fork_without_libc();
    if (child == 0)
        return 0;
    int error = errno;
    if (setns(loop->own_pidns_fd, CLONE_NEWPID) || (mounts && setns(loop->own_mntns_fd, CLONE_NEWNS)))
        _exit(1); /* fail closed: every later child would start in this program's namespaces */
    if (child > 0)
        return child;
    if (s->stub > 0) {
        kill(s->stub, SIGKILL);
        waitpid(s->stub, NULL, __WALL);
    }
    errno = error;
    return -1;
}

/* In the child. Returns the mapped page, or exits. */
static void *become_program(struct slot *s) {
    sigprocmask(SIG_SETMASK, &loop->python_signals, NULL);
    void *page = confine(s);
    if (!page)
        _exit(EXIT_NOT_CONFINED);
    own_progress = &config.progress[s->request.slot];
#if PY_VERSION_HEX >= 0x030E0000
    PyOS_BeforeFork(); /* takes the locks that the next call releases; there is no other thread */
    PyOS_AfterFork_Child();
#endif /* earlier versions only renew locks, none of which is held here, and run hooks; program.py does their work (-0.7 ms) */
    return page;
}

/* With control groups a session needs no attention between two requests. */
int is_watched(struct slot *s) { return !s->is_session || !(config.layers & LAYER_CGROUP); }

void *start_program(struct request *request, int *fd) {
    struct slot *s = &loop->slots[request->slot];
    s->request = *request;
    memcpy(s->fd, fd, sizeof s->fd);
    for (int i = FD_STDIN, next = FD_STDIN; i < RUN_FDS; i++) /* descriptors that are absent leave no gap */
        s->fd[i] = request->flags >> (i - FD_STDIN) & 1 ? fd[next++] : -1;
    s->is_session = s->fd[FD_CONTROL] >= 0;
    s->child_reaped = s->stub_reaped = 0;
    s->ended_by = BY_ITSELF;
    s->status = s->cpu_ns = s->ended_ns = 0;
    s->processes_peak = 1;
    config.progress[request->slot] = (struct progress){.step = -1};
    s->forked_ns = now_ns();
    int64_t most_ns = request->wall_ns < request->deadline_ns ? request->wall_ns : request->deadline_ns;
    s->due_ns = s->is_session ? INT64_MAX : s->forked_ns + most_ns;
    meter_start(&s->meter, s->cgroup[CG_CPU_USAGE], s->forked_ns);
    pid_t child = take_network(s) || apply_limits(s) ? -1 : start_stub_and_fork(s);
    if (child == 0)
        return become_program(s);
    if (child < 0) {
        report_not_started(request, errno);
        give_back_network(s);
        close_all(s->fd, RUN_FDS);
        return NULL;
    }
    s->child = child;
    if (++loop->forks % FORKS_PER_COLLAPSE == 0)
        huge_pages_collapse();
    if (!s->stub)
        s->stub_reaped = 1;
    s->state = SLOT_RUNNING;
    loop->running += is_watched(s);
    close_all(&s->fd[FD_PAGE], RUN_FDS - FD_PAGE); /* keeps the outputs, which the loop watches */
    if (s->is_session) {
        close_all(s->fd, RUN_FDS); /* the worker watches the output of each cell itself */
        if (!member_add((int)request->slot, request->member, child))
            end_program(s, BY_REQUEST);
    }
    return NULL;
}
