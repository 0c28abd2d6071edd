/* The zygote's loop: fork a confined child per request, end it by its limits, reap it, report what the kernel measured.
 *
 * Runs in the warm interpreter without touching its heap, so that pages stay shared with the children. The parent never reads
 * a byte of the caller's. `serve` returns to Python only in a confined child. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include "cpu_meter.h"
#include "folder.h"
#include "forking.h"
#include "huge_pages.h"
#include "supervisor.h"
#include "landlock.h"
#include "session_members.h"
#include "small_objects.h"
#include "raw.h"
#include "sandbox.h"
#include "syscall_table.h"
#include "watchdog.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_SLOTS 1024
#define TICK_NS 50000000LL
#define LOOK_AGAIN_NS 5000000LL /* after a look at a program that has nearly used up its time */
#define ROUND_MOST_NS 100000000LL
#define CLEARING_MOST_NS 30000000000LL
#define EXIT_NOT_CONFINED 253
#define FORKS_BEFORE_MENDING 500
#define LEAVERS_TOGETHER 8
#define NETWORKS_KEPT 16 /* as many as programs run at a time here, most of the time */
#define LEFT_MOST_BYTES (256 << 10)
#define LEFT_MOST_FILES 256
#define SAYS_MOST (MAX_SLOTS + MOST_MEMBERS + 1) /* an end of each, and the answer to one request */
#define MAIN_FILE "/main.py"
#define PLAIN_PAYLOAD 'p'
enum { VALUE_LENGTH_AT = 8, VALUE_AT = 16 };

static PyObject *fail(const char *what) { return PyErr_SetFromErrnoWithFilename(PyExc_OSError, what); }

static struct house house = {.landlock_fd = -1};
/* What the loop writes to, on pages of its own: a write to a huge page that a child shares would break it up, and each later fork
 * would have 512 small pages to copy. For the same reason the loop's system calls leave errno alone where they often fail. */
static struct book {
    int slots_known; /* highest known index + 1 */
    int running;     /* slots that have to be looked at while they run */
    int next_watched;
    int leavers_idle; /* that have not been killed yet */
    int first_say, says; /* that wait in `waiting_says` */
    int64_t forks;
    int networks_idle; /* network namespaces that no program is in */
    int networks[NETWORKS_KEPT];
    struct leaver {
        pid_t stub; /* 0: a free place, perhaps with a stack that can be used again */
        int is_killed;
        char *stack;
    } leavers[LEAVERS_MOST];
    struct slot slots[MAX_SLOTS]; /* the first of them on the page of what is above, since a fork makes each page dearer to write */
    struct say waiting_says[SAYS_MOST];
} *book;
static int control_fd = -1, signal_fd = -1, own_pidns_fd = -1, own_mntns_fd = -1, own_netns_fd = -1;
static sigset_t python_signals;
static struct progress *own_progress; /* in a child */
static char *own_page;                /* in a program */

int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* ---- the init stub: PID 1 of a program's namespace, and the handle that kills all of it ---- */

/* Shares memory with the zygote (CLONE_VM), so: no libc, nothing on the heap. SIGCHLD is ignored, which makes the kernel
 * reap what is re-parented to it; every other signal is blocked and only SIGKILL from outside ends it. */
static int stub_main(void *argument) {
    long uid = (long)(intptr_t)argument;
    struct { void (*handler)(int); unsigned long flags; void (*restorer)(void); unsigned long mask; } ignore = {SIG_IGN, 0, NULL, 0};
    unsigned long every_signal = ~0UL;
    raw4(SYS_rt_sigprocmask, SIG_SETMASK, (long)&every_signal, 0, 8);
    raw4(SYS_rt_sigaction, SIGCHLD, (long)&ignore, 0, 8);
    raw4(SYS_close_range, 0, ~0U, 0, 0);
    if (house.layers & LAYER_UID) {
        raw4(SYS_setresgid, uid, uid, uid, 0);
        raw4(SYS_setresuid, uid, uid, uid, 0);
    }
    raw4(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0);
    for (;;)
        raw4(SYS_ppoll, 0, 0, 0, 0);
    return 0;
}

/* ---- measuring, through files that the runner opened ---- */

static int read_text(int fd, char *text, size_t size) {
    ssize_t n = fd < 0 ? -1 : pread(fd, text, size - 1, 0);
    text[n > 0 ? n : 0] = 0;
    return n > 0;
}

static int64_t number_after(const char *text, const char *name, int64_t otherwise) {
    const char *at = strstr(text, name);
    return at ? strtoll(at + strlen(name), NULL, 10) : otherwise;
}

static int64_t read_number(int fd) {
    char text[32];
    return read_text(fd, text, sizeof text) ? strtoll(text, NULL, 10) : 0;
}

static struct ooms read_ooms(struct slot *s) {
    char text[512];
    read_text(s->cgroup[CG_MEMORY_EVENTS], text, sizeof text);
    return (struct ooms){number_after(text, "\noom_kill ", 0), number_after(text, "\noom ", -1)};
}

/* Whose memory ended when the kernel killed a process of the slot: the slot's, or that of the machine or pod. */
static int64_t oom_by(struct ooms before, struct ooms now) {
    if (now.kills == before.kills || now.limit_hits < 0)
        return OOM_BY_UNKNOWN;
    return now.limit_hits > before.limit_hits ? OOM_BY_LIMIT : OOM_BY_MACHINE;
}

static int write_number(int fd, int64_t number) {
    char text[24];
    int n = snprintf(text, sizeof text, "%lld", (long long)number);
    return fd < 0 || pwrite(fd, text, (size_t)n, 0) == n ? 0 : -1;
}

static void note_processes(struct slot *s, int64_t n) {
    if (n > s->processes_peak)
        s->processes_peak = n;
}

static void sample_processes(struct slot *s) { note_processes(s, read_number(s->cgroup[CG_PIDS_NOW])); }

/* Where no control group counts. The keeper, if there is one, is not of the program's. */
static int too_much_memory(struct slot *s) {
    int64_t processes = 0;
    pid_t roots[256];
    int count = s->is_session ? member_pids((int)(s - book->slots), roots, 256) : 1;
    if (!s->is_session || !count)
        roots[0] = s->child, count = 1;
    int too_much = uses_more_memory(roots, count, s->stub, s->ask.memory_bytes, &processes);
    note_processes(s, s->stub ? processes : processes - 1);
    return too_much;
}

/* How long the program has starved so far. The stub adopts its orphans and has no children of its own, the keeper has one. */
static int64_t look_at_cpu(struct slot *s, int64_t now) {
    if (s->cgroup[CG_CPU_USAGE] >= 0)
        return meter_group(&s->meter, s->cgroup[CG_CPU_USAGE], s->cgroup[CG_THREADS], NULL, now);
    return s->stub ? meter_one(&s->meter, s->child, s->stub, 0, now)
                   : meter_one(&s->meter, first_child(s->child), s->child, 1, now);
}

/* ---- answers ---- */

/* 0 if it has to be tried again: the socket is full, or the kernel lacks memory. A worker that is gone needs no answer. */
static int sent(const struct say *message) {
    return send(control_fd, message, sizeof *message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 || errno == EPIPE || errno == ECONNRESET ||
           errno == ENOTCONN;
}

/* Never waits for the worker: meanwhile nobody would enforce a limit. What does not fit into the socket is sent when there is room.
 * Until then no request is read, so that only ends can be added, of which there are no more than slots and members. */
static void say(const struct say *message) {
    if (!book->says && sent(message))
        return;
    if (book->says == SAYS_MOST)
        _exit(1); /* unreachable */
    book->waiting_says[(book->first_say + book->says++) % SAYS_MOST] = *message;
}

static void send_waiting_says(void) {
    for (; book->says && sent(&book->waiting_says[book->first_say]); book->says--)
        book->first_say = (book->first_say + 1) % SAYS_MOST;
}

static void close_all(int *fd, int count) {
    for (int i = 0; i < count; i++) {
        if (fd[i] >= 0)
            close(fd[i]);
        fd[i] = -1;
    }
}

static void say_not_started(struct ask *ask, int step, int error) {
    struct say message = {.kind = SAY_ENDED, .slot = ask->slot, .call = ask->call, .step = step, .error = error};
    say(&message);
}

/* ---- one program's life, seen from outside ---- */

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

/* ---- network namespaces: programs that run at the same time must not meet by the names of sockets ---- */

static int new_network(void) {
    if (unshare(CLONE_NEWNET))
        return -1;
    int network = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (setns(own_netns_fd, CLONE_NEWNET))
        _exit(1); /* cannot go on: this process would be in a program's namespace */
    return network;
}

static int take_network(struct slot *s) {
    s->network = -1;
    if (!(house.layers & LAYER_MOUNTS))
        return 0;
    s->network = book->networks_idle ? book->networks[--book->networks_idle] : new_network();
    return s->network < 0 ? -1 : 0;
}

/* A socket outlives its program while it is in flight to somebody, for example to itself. The next program would see its name. */
static int has_no_sockets(int network) {
    char text[256];
    if (setns(network, CLONE_NEWNET))
        return 0;
    int fd = open("/proc/self/net/unix", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text);
    if (fd >= 0)
        close(fd);
    if (setns(own_netns_fd, CLONE_NEWNET))
        _exit(1);
    return n > 0 && memchr(text, '\n', (size_t)n) == text + n - 1; /* nothing but the names of the columns */
}

static void give_back_network(struct slot *s) {
    if (s->network >= 0 && book->networks_idle < NETWORKS_KEPT && has_no_sockets(s->network))
        book->networks[book->networks_idle++] = s->network;
    else if (s->network >= 0)
        close(s->network);
    s->network = -1;
}

/* No fork needs it: a stub shares the zygote's memory. */
static char *new_stack(void) {
    char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED)
        return NULL;
    madvise(stack, STACK_BYTES, MADV_DONTFORK);
    return stack;
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
static int is_watched(struct slot *s) { return !s->is_session || !(house.layers & LAYER_CGROUP); }

static void end(struct slot *s, int by);

static void *start(struct ask *ask, int *fd) {
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

/* ---- stubs that outlive their program's end ----
 *
 * Whoever leaves a mount namespace last waits until every core has passed a point of rest (synchronize_rcu_expedited), 2 to 7 ms
 * on a busy machine. The stub is in the program's, so that it is the stub who waits. Nobody waits for the stub where the kernel's
 * count says that no process of the program is left and its files take no memory to speak of, which would count as the next
 * program's: then the program is over, and the stub leaves later. Some leave together, since those who wait at the same time wait
 * for the same point (3 % less CPU time for a short program than one by one). */

static struct leaver *leaver_by_pid(pid_t pid) {
    for (int i = 0; i < LEAVERS_MOST; i++)
        if (book->leavers[i].stub == pid)
            return &book->leavers[i];
    return NULL;
}

static void dismiss_leavers(void) {
    for (int i = 0; book->leavers_idle && i < LEAVERS_MOST; i++) {
        struct leaver *one = &book->leavers[i];
        if (!one->stub || one->is_killed)
            continue;
        kill(one->stub, SIGKILL);
        one->is_killed = 1;
        book->leavers_idle--;
    }
}

static int has_no_process(struct slot *s) {
    char now[4];
    return s->cgroup[CG_PIDS_NOW] >= 0 && pread(s->cgroup[CG_PIDS_NOW], now, sizeof now, 0) == 2 && now[0] == '0';
}

/* As the stub sees them. */
static int has_few_files(struct slot *s) {
    char path[64];
    struct statfs files;
    snprintf(path, sizeof path, "/proc/%d/root" WORKSPACE, (int)s->stub);
    return !statfs(path, &files) && (int64_t)(files.f_blocks - files.f_bfree) * files.f_bsize <= LEFT_MOST_BYTES &&
           files.f_files - files.f_ffree <= LEFT_MOST_FILES;
}

/* 0 if its stub has to be waited for. */
static int let_leave(struct slot *s) {
    struct leaver *place = leaver_by_pid(0);
    if (!place || s->is_session || !(house.layers & LAYER_MOUNTS) || !has_no_process(s) || !has_few_files(s))
        return 0;
    char *spare = place->stack;
    *place = (struct leaver){s->stub, 0, s->stub_stack};
    s->stub_stack = spare;
    if (++book->leavers_idle >= LEAVERS_TOGETHER)
        dismiss_leavers();
    return 1;
}

static int has_left(pid_t pid) {
    struct leaver *one = leaver_by_pid(pid);
    if (!one)
        return 0;
    one->stub = 0;
    book->leavers_idle -= !one->is_killed;
    return 1;
}

static void end(struct slot *s, int by) {
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

static int64_t cpu_ns_of(struct rusage *u) {
    return (u->ru_utime.tv_sec + u->ru_stime.tv_sec) * 1000000000LL + (u->ru_utime.tv_usec + u->ru_stime.tv_usec) * 1000LL;
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

static void reap(void) {
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

static int64_t file_size(int fd) {
    struct stat st;
    return fd < 0 || fstat(fd, &st) ? 0 : st.st_size;
}

/* While the keeper removes what the last program left, this one's time has not begun. */
static int64_t began_ns(struct slot *s, int64_t now) {
    if (s->stub || now - s->forked_ns > CLEARING_MOST_NS)
        return s->forked_ns;
    int64_t cleared_ns = house.progress[s - book->slots].cleared_ns;
    return cleared_ns ? cleared_ns : now;
}

/* On a busy machine a program gets the time that it was promised: its limit counts the time that it had, its deadline all time.
 * Returns what is used up, or 0; `due_ns` becomes the time at which that happens if it starves no more. */
static int time_is_up(struct slot *s, int64_t now) {
    int64_t began = began_ns(s, now), starved = look_at_cpu(s, now);
    int64_t wall_due = began + s->ask.wall_ns + starved, deadline = began + s->ask.deadline_ns;
    s->due_ns = wall_due < deadline ? wall_due : deadline;
    if (now >= s->due_ns)
        return wall_due <= deadline ? BY_WALL : BY_DEADLINE;
    if (s->due_ns < now + LOOK_AGAIN_NS)
        s->due_ns = now + LOOK_AGAIN_NS;
    return 0;
}

static void watch(struct slot *s, int64_t now) {
    if (s->state != SLOT_RUNNING)
        return;
    if (s->is_session) {
        if (is_watched(s) && too_much_memory(s))
            end(s, BY_MEMORY);
        return;
    }
    int used_up = time_is_up(s, now);
    if (used_up)
        end(s, used_up);
    else if (file_size(s->fd[FD_STDOUT]) > s->ask.output_bytes || file_size(s->fd[FD_STDERR]) > s->ask.output_bytes)
        end(s, BY_OUTPUT);
    else if (read_ooms(s).kills > s->ooms_before.kills)
        end(s, BY_MEMORY);
    else if (!(house.layers & LAYER_CGROUP) && too_much_memory(s))
        end(s, BY_MEMORY);
    else
        sample_processes(s);
}

/* A look at every program, at those past their deadline at any time. Where no control group counts, a look at a fork bomb takes
 * long: then the round is cut short and goes on with the next program, so that the worker is heard in between. */
static int watch_all(int due) {
    int64_t began = now_ns(), now = began;
    for (int seen = 0; book->running && seen < book->slots_known; seen++) {
        struct slot *s = &book->slots[book->next_watched % book->slots_known];
        book->next_watched = (book->next_watched + 1) % book->slots_known;
        if (due || s->due_ns <= now)
            watch(s, now);
        if ((now = now_ns()) - began > ROUND_MOST_NS)
            return 0;
    }
    return 1;
}

static int next_timeout_ms(int64_t last_tick, int64_t now) {
    if (!book->running)
        return -1;
    int64_t next = last_tick + TICK_NS;
    for (int i = 0; i < book->slots_known; i++)
        if (book->slots[i].state == SLOT_RUNNING && book->slots[i].due_ns < next)
            next = book->slots[i].due_ns;
    return next <= now ? 0 : (int)((next - now + 999999) / 1000000);
}

/* ---- requests ---- */

static int receive(struct ask *ask, int *fd, int most) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * SLOT_FDS)];
    } control;
    struct iovec data = {ask, sizeof *ask};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n = raw4(SYS_recvmsg, control_fd, (long)&message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT, 0);
    if (n <= 0)
        return n == -EAGAIN || n == -EINTR ? -1 : 0;
    for (int i = 0; i < most; i++)
        fd[i] = -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fd, CMSG_DATA(c), sizeof(int) * (count < (size_t)most ? count : (size_t)most));
        }
    return (size_t)n == sizeof *ask ? 1 : -1;
}

/* ASK_SLOT: wall_ns carries the uid, cpu_s a bit per descriptor that is present. */
static void learn_slot(struct ask *ask, int *fd) {
    struct slot *s = &book->slots[ask->slot];
    int named = __builtin_popcountll((unsigned long long)ask->cpu_s);
    if ((house.layers & LAYER_UID && (ask->wall_ns < house.first_uid || ask->wall_ns > house.last_uid)) || s->state > SLOT_FREE ||
        named > SLOT_FDS || (named && fd[named - 1] < 0)) { /* descriptors are lost where there is no room for more */
        close_all(fd, SLOT_FDS); /* a worker cannot choose whom a program runs as, nor change the place of one that runs */
        return;
    }
    if (s->state == SLOT_FREE) /* a session's place, in which nothing could be started last time */
        close_all(s->cgroup, SLOT_FDS);
    s->uid = ask->wall_ns;
    for (int i = 0, next = 0; i < SLOT_FDS; i++)
        s->cgroup[i] = (ask->cpu_s >> i & 1) ? fd[next++] : -1;
    s->state = SLOT_FREE;
    if (ask->slot >= book->slots_known)
        book->slots_known = (int)ask->slot + 1;
}

/* ---- the members of a session ---- */

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

static void obey_about_member(struct ask *ask, int *fd) {
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

static void *obey(struct ask *ask, int *fd) {
    if (ask->slot < 0 || ask->slot >= MAX_SLOTS)
        return close_all(fd, SLOT_FDS), NULL;
    struct slot *s = &book->slots[ask->slot];
    switch (ask->kind) {
    case ASK_SLOT:
        learn_slot(ask, fd);
        return NULL;
    case ASK_RUN:
        if (s->state == SLOT_FREE && fd[FD_PAGE] >= 0)
            return start(ask, fd);
        say_not_started(ask, -1, EBUSY);
        close_all(fd, SLOT_FDS);
        return NULL;
    case ASK_KILL:
        if (s->ask.call == ask->call)
            end(s, BY_REQUEST);
        return NULL;
    case ASK_PING:
        say(&(struct say){.kind = SAY_PONG, .call = ask->call});
        return NULL;
    case ASK_MEMBER:
    case ASK_INTERRUPT:
    case ASK_END_MEMBER:
    case ASK_USAGE:
    case ASK_PROCESSES:
        obey_about_member(ask, fd);
        return NULL;
    }
    return NULL;
}

/* Returns a program's page in the child; NULL when the worker is gone. */
static void *serve_loop(void) {
    int64_t last_tick = now_ns();
    for (;;) {
        struct pollfd fds[2] = {{.fd = control_fd, .events = book->says ? POLLOUT : POLLIN}, {.fd = signal_fd, .events = POLLIN}};
        int was_idle = !book->running;
        poll(fds, 2, next_timeout_ms(last_tick, now_ns()));
        if (was_idle)
            last_tick = now_ns(); /* the first look at a program comes one tick after it started */
        if (fds[1].revents)
            reap();
        if (fds[0].revents) {
            struct ask ask;
            int fd[SLOT_FDS], got = -1;
            send_waiting_says();
            while (!book->says && (got = receive(&ask, fd, SLOT_FDS)) == 1) {
                void *page = obey(&ask, fd);
                if (page)
                    return page;
            }
            if (got == 0)
                return NULL;
        }
        int64_t now = now_ns();
        int due = now - last_tick >= TICK_NS;
        if (due || !book->running)
            dismiss_leavers();
        if (watch_all(due) && due)
            last_tick = now;
    }
}

/* ---- the module ---- */

static int64_t own_address_space(void) {
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    int64_t pages = read_number(fd);
    if (fd >= 0)
        close(fd);
    return pages * sysconf(_SC_PAGESIZE);
}

static int read_rules(PyObject *rules) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rules); i++) {
        const char *path, *access;
        struct rule *rule = &house.rules[house.rule_count];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(rules, i), "ss", &path, &access))
            return -1;
        if (house.rule_count >= (int)(sizeof house.rules / sizeof *house.rules) || strlen(path) >= sizeof rule->path)
            return PyErr_SetString(PyExc_ValueError, "too many or too long Landlock rules"), -1;
        strcpy(rule->path, path);
        rule->access = *access;
        house.rule_count++;
    }
    return 0;
}

/* With mount namespaces all programs write to the same path, so that one ruleset serves all. */
static int make_ruleset(void) {
    if (!(house.layers & LAYER_LANDLOCK) || !(house.layers & LAYER_MOUNTS))
        return 0;
    house.landlock_fd = landlock_new_ruleset();
    if (house.landlock_fd < 0)
        return fail("landlock_create_ruleset"), -1;
    for (int i = 0; i < house.rule_count; i++)
        if (landlock_allow(house.landlock_fd, house.rules[i].path, house.rules[i].access))
            return fail(house.rules[i].path), -1;
    return 0;
}

/* The bytes are those of Python objects that live as long as the zygote. */
static struct sock_fprog as_filter(const char *bytes, Py_ssize_t size) {
    return (struct sock_fprog){(unsigned short)((size_t)size / sizeof(struct sock_filter)), (struct sock_filter *)bytes};
}

/* Inherited by every child, which adds the rest (seccomp.py). */
static int put_on_filter(struct sock_fprog filter) {
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter);
}

/* In the child, before the program runs: nothing is in its way yet. */
static int write_new_file(const char *path, const char *data, Py_ssize_t size) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    ssize_t n = 0;
    for (Py_ssize_t at = 0; fd >= 0 && n >= 0 && at < size; at += n)
        n = write(fd, data + at, (size_t)(size - at));
    return fd < 0 || n < 0 || close(fd) ? -1 : 0;
}

/* Plain code goes to its place right away, where that is the same for all. */
static PyObject *take_code(const char *code, Py_ssize_t size) {
    if (house.layers & LAYER_MOUNTS && write_new_file(MAIN_FILE, code, size))
        return fail(MAIN_FILE);
    return PyUnicode_DecodeUTF8(code, size, "surrogatepass");
}

/* In the child, when it is confined: the first bytes of the caller's (payload.py). */
static PyObject *read_payload(void) {
    struct stat st;
    ssize_t size = fstat(CHILD_FD_PAYLOAD, &st) ? 0 : st.st_size - PAGE_BYTES;
    char *data = size > 0 ? malloc((size_t)size) : NULL;
    for (ssize_t at = 0, n; data && at < size; at += n)
        if ((n = pread(CHILD_FD_PAYLOAD, data + at, (size_t)(size - at), PAGE_BYTES + at)) <= 0) {
            free(data);
            return fail("payload");
        }
    if (!data)
        return fail("payload");
    if (*data != PLAIN_PAYLOAD && ftruncate(CHILD_FD_PAYLOAD, PAGE_BYTES)) /* a session would keep its files here as long as it lives */
        return fail("payload");
    close(CHILD_FD_PAYLOAD);
    PyObject *payload = *data == PLAIN_PAYLOAD ? take_code(data + 1, size - 1) : PyBytes_FromStringAndSize(data + 1, size - 1);
    free(data);
    return payload;
}

static PyObject *py_serve(PyObject *self, PyObject *args) {
    (void)self;
    const char *early, *late, *scratch;
    Py_ssize_t early_bytes, late_bytes;
    PyObject *rules;
    if (!PyArg_ParseTuple(args, "iIO!y#y#sLpLL", &control_fd, &house.layers, &PyList_Type, &rules, &early, &early_bytes, &late,
                          &late_bytes, &scratch, &house.foreign_processes, &house.faults, &house.first_uid, &house.last_uid))
        return NULL;
    if (read_rules(rules))
        return NULL;
    snprintf(house.scratch, sizeof house.scratch, "%s", scratch);
    house.filter = as_filter(late, late_bytes);
    heap_settle();
    house.progress = mmap(NULL, sizeof(struct progress) * MAX_SLOTS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    book = mmap(NULL, sizeof *book, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (house.progress == MAP_FAILED || book == MAP_FAILED)
        return fail("mmap");
    nursery_prepare();
    house.base_address_space = own_address_space(); /* without what was reserved for the warm heap */
    remember_own_memory();
    learn_thread_addresses();
    for (int fd; (fd = open("/dev/null", O_RDWR | O_CLOEXEC)) < FIRST_FREE_FD;)
        if (fd < 0)
            return fail("/dev/null");
    if (make_ruleset()) /* after the fillers, so that its number is high */
        return NULL;
    if (house.layers & LAYER_PIDNS && (own_pidns_fd = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC)) < 0)
        return fail("/proc/self/ns/pid");
    if (house.layers & LAYER_MOUNTS && /* and there is a way back */
        ((own_mntns_fd = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC)) < 0 || setns(own_mntns_fd, CLONE_NEWNS)))
        return fail("/proc/self/ns/mnt");
    if (house.layers & LAYER_MOUNTS && (own_netns_fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)) < 0)
        return fail("/proc/self/ns/net");
    sigset_t child_signal;
    sigemptyset(&child_signal);
    sigaddset(&child_signal, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child_signal, &python_signals);
    signal_fd = signalfd(-1, &child_signal, SFD_NONBLOCK | SFD_CLOEXEC);
    if (signal_fd < 0)
        return fail("signalfd");
    if (house.layers & LAYER_SECCOMP && put_on_filter(as_filter(early, early_bytes)))
        house.filter_error = errno; /* of every child, whose step it belongs to */
    say(&(struct say){.kind = SAY_READY, .call = getpid()});
    void *page = serve_loop();
    if (!page)
        _exit(0);
    own_page = page;
    nursery_open();
    return read_payload();
}

/* In the child, when everything is ready: from here on the process belongs to the program, and so does its word. */
static PyObject *py_begin(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    own_progress->ready_ns = now_ns();
    if (munmap(house.progress, sizeof(struct progress) * MAX_SLOTS))
        _exit(EXIT_NOT_CONFINED);
    Py_RETURN_NONE;
}

/* What the program says of itself, laid out as page.py reads it. */
static PyObject *py_say_completed(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    own_page[0] = 1;
    Py_RETURN_NONE;
}

static PyObject *py_say_value(PyObject *self, PyObject *value) {
    (void)self;
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(value, &data, &size))
        return NULL;
    uint64_t kept = (uint64_t)size < PAGE_BYTES - VALUE_AT ? (uint64_t)size : PAGE_BYTES - VALUE_AT, length = kept + 1;
    memcpy(own_page + VALUE_AT, data, kept);
    memcpy(own_page + VALUE_LENGTH_AT, &length, sizeof length);
    Py_RETURN_NONE;
}

static PyObject *py_write_file(PyObject *self, PyObject *args) {
    (void)self;
    const char *path, *data;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "sy#", &path, &data, &size))
        return NULL;
    if (write_new_file(path, data, size))
        return fail(path);
    Py_RETURN_NONE;
}

/* In a session, which has one thread: 0 in the fork. */
static PyObject *py_fork_beside(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyOS_BeforeFork();
    pid_t pid = fork_beside();
    int error = errno;
    if (pid == 0)
        PyOS_AfterFork_Child();
    else
        PyOS_AfterFork_Parent();
    errno = error;
    return pid < 0 ? fail("clone") : PyLong_FromLong(pid);
}

#define MESSAGE_BYTES 65536
#define MESSAGE_FDS 160

static PyObject *fd_list(struct msghdr *message) {
    PyObject *list = PyList_New(0);
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); list && c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
            if (fd < FIRST_FREE_FD) { /* a cell has closed one of the numbers that mean something */
                int low = fd;
                fd = fcntl(low, F_DUPFD_CLOEXEC, FIRST_FREE_FD);
                close(low);
            }
            PyObject *number = PyLong_FromLong(fd);
            if (!number || PyList_Append(list, number))
                Py_CLEAR(list);
            Py_XDECREF(number);
            if (!list)
                break;
        }
    }
    return list;
}

/* In a session: the next message of its worker and the descriptors that came with it; no bytes when the worker is gone. In C
 * because the module `socket` is not loaded in every zygote. */
static PyObject *py_receive(PyObject *self, PyObject *args) {
    (void)self;
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * MESSAGE_FDS)];
    } control;
    PyObject *data = PyBytes_FromStringAndSize(NULL, MESSAGE_BYTES);
    if (!data)
        return NULL;
    struct iovec space = {PyBytes_AS_STRING(data), MESSAGE_BYTES};
    struct msghdr message;
    ssize_t n;
    do {
        message = (struct msghdr){.msg_iov = &space, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        Py_BEGIN_ALLOW_THREADS;
        n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        Py_END_ALLOW_THREADS;
    } while (n < 0 && errno == EINTR && !PyErr_CheckSignals());
    if (n < 0) {
        Py_DECREF(data);
        return PyErr_Occurred() ? NULL : fail("recvmsg");
    }
    PyObject *fds = fd_list(&message);
    if (!fds || _PyBytes_Resize(&data, n)) {
        Py_XDECREF(fds);
        return NULL;
    }
    return Py_BuildValue("NN", data, fds);
}

/* A session lives long: what its children leave behind becomes its own, and what it frees is given back, unlike in the zygote
 * (jail.py) and in programs, which are over before that would pay. */
static PyObject *py_settle_down(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        return fail("PR_SET_CHILD_SUBREAPER");
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    mallopt(M_TRIM_THRESHOLD, 4 << 20);
    Py_RETURN_NONE;
}

static PyObject *py_steps(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *names = PyTuple_New(step_count());
    for (int i = 0; names && i < step_count(); i++)
        PyTuple_SET_ITEM(names, i, PyUnicode_FromString(step_name(i)));
    return names;
}

static PyObject *py_landlock_abi(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromLong(landlock_abi());
}

/* For good, for this process and all that it forks: what an executed file could give, and these of its own. False: it may not. */
static PyObject *py_give_up_capabilities(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long given_up;
    if (!PyArg_ParseTuple(args, "K", &given_up))
        return NULL;
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2];
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) || syscall(SYS_capget, &header, sets))
        return fail("capget");
    for (int capability = 0, is_bounded; (is_bounded = prctl(PR_CAPBSET_READ, capability, 0, 0, 0)) >= 0; capability++)
        if (is_bounded && prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
            Py_RETURN_FALSE; /* without CAP_SETPCAP: no_new_privs has to do */
    for (int i = 0; i < 2; i++) {
        unsigned kept = ~(unsigned)(given_up >> 32 * i);
        sets[i].effective &= kept, sets[i].permitted &= kept, sets[i].inheritable = 0;
    }
    if (syscall(SYS_capset, &header, sets))
        return fail("capset");
    Py_RETURN_TRUE;
}

static PyObject *py_use_huge_pages(PyObject *self, PyObject *args) {
    (void)self;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "n", &most))
        return NULL;
    if (heap_init((size_t)most))
        return fail("mmap");
    Py_RETURN_NONE;
}

static PyObject *py_forbid_dumps(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    if (prctl(PR_SET_DUMPABLE, 0))
        return fail("PR_SET_DUMPABLE");
    Py_RETURN_NONE;
}

static PyObject *py_remove_folder(PyObject *self, PyObject *args) {
    (void)self;
    const char *path;
    if (!PyArg_ParseTuple(args, "s", &path))
        return NULL;
    if (remove_folder(path))
        return fail(path);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"serve", py_serve, METH_VARARGS, "Fork programs; returns in a child: plain code, or the bytes of a payload."},
    {"begin", py_begin, METH_NOARGS, "Mark the program as started, and give up the means to say so."},
    {"say_completed", py_say_completed, METH_NOARGS, "The program's last line was reached."},
    {"say_value", py_say_value, METH_O, "The bytes of its value, cut to what fits."},
    {"write_file", py_write_file, METH_VARARGS, "Write a new file."},
    {"fork_beside", py_fork_beside, METH_NOARGS, "In a session: fork a sibling of this process; 0 in it."},
    {"receive", py_receive, METH_VARARGS, "In a session: the next message of its worker, and its descriptors."},
    {"settle_down", py_settle_down, METH_NOARGS, "In a session: adopt orphans, give back memory."},
    {"steps", py_steps, METH_NOARGS, "The names of the child's set-up steps, in order."},
    {"landlock_abi", py_landlock_abi, METH_NOARGS, "The kernel's Landlock ABI, or -1."},
    {"give_up_capabilities", py_give_up_capabilities, METH_VARARGS, "Empty the bounding set and give up these, a bit for each."},
    {"use_huge_pages", py_use_huge_pages, METH_VARARGS, "Put Python's objects on huge pages, up to so many bytes, until `serve`."},
    {"remove_folder", py_remove_folder, METH_VARARGS, "Remove a folder, if it is there, and all below it; follows no link."},
    {"forbid_dumps", py_forbid_dumps, METH_NOARGS, "Keep /proc/PID of this process to root."},
    {0},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "_zygote", .m_size = -1, .m_methods = METHODS};

PyMODINIT_FUNC PyInit__zygote(void) {
    PyObject *module = PyModule_Create(&MODULE);
    PyObject *table = PyDict_New();
    if (!module || !table)
        return NULL;
    for (size_t i = 0; i < sizeof SYSCALL_TABLE / sizeof *SYSCALL_TABLE; i++) {
        PyObject *number = PyLong_FromLong(SYSCALL_TABLE[i].number);
        if (!number || PyDict_SetItemString(table, SYSCALL_TABLE[i].name, number))
            return NULL;
        Py_DECREF(number);
    }
    if (PyModule_AddObject(module, "SYSCALLS", table))
        return NULL;
    PyModule_AddStringConstant(module, "MAIN_FILE", MAIN_FILE);
    PyModule_AddIntConstant(module, "LAYER_PIDNS", LAYER_PIDNS);
    PyModule_AddIntConstant(module, "LAYER_MOUNTS", LAYER_MOUNTS);
    PyModule_AddIntConstant(module, "LAYER_UID", LAYER_UID);
    PyModule_AddIntConstant(module, "LAYER_CGROUP", LAYER_CGROUP);
    PyModule_AddIntConstant(module, "LAYER_LANDLOCK", LAYER_LANDLOCK);
    PyModule_AddIntConstant(module, "LAYER_SECCOMP", LAYER_SECCOMP);
    PyModule_AddIntConstant(module, "CONTROL_FD", CHILD_FD_CONTROL);
    return module;
}
