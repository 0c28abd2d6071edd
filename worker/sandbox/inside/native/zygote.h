/* The state of a zygote, and the functions that its parts offer each other. */
#pragma once
#include "protocol.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_SLOTS 1024
#define MAX_MEMBERS 4096
#define EXIT_NOT_CONFINED 253
#define MAX_IDLE_NETWORKS 16 /* most of the time no more programs than this run in one zygote */
#define MAX_PENDING_REPORTS (MAX_SLOTS + MAX_MEMBERS + 1) /* one end of each, and the answer to one request */
#define MAX_KNOWN_THREADS 16
#define STACK_BYTES 16384
#define WORKSPACE "/w/call" /* jail.py */
#define MAX_LINGERING_STUBS 24 /* RLIMIT_NPROC counts them as processes of their uid */
#define PAGE_BYTES 65536 /* payload.py */
#define SESSION_FORKS 160 /* RLIMIT_NPROC allows a session this many more processes, for forks and checkpoints */
#define FIRST_FREE_FD 10 /* lower numbers are fillers: no received descriptor collides with the child's final numbers */
enum { CHILD_FD_PAYLOAD = 3, CHILD_FD_LANDLOCK = 4, CHILD_FD_BINARY = 5, CHILD_FD_CONTROL = 6 };

struct cpu_meter { /* see cpu_meter.c */
    int64_t usage_before_ns; /* of the control group, or of the one thread, at the start */
    int64_t one_before_ns;   /* run + wait of the one thread at the start, if it was there before */
    int64_t started_ns, starved_ns;
    int64_t top_ns, waits_since_ns; /* the longest run + wait; since when that thread is runnable with this value, or 0 */
    pid_t top;                    /* the thread that has it */
    int has_company;              /* without control groups: it has, or had, more than one thread */
};

/* A session's threads at the start of a cell: their time before the cell does not count. */
struct known_threads {
    int count, is_full; /* full: a thread that is not listed may be new or old */
    struct known_thread {
        pid_t id;
        int64_t ns;
    } threads[MAX_KNOWN_THREADS];
};

/* Layers that probe.py found working. If a layer is on and fails, the program does not run. */
enum {
    LAYER_PIDNS = 1 << 0,   /* own PID namespace with an init stub; else a supervisor process */
    LAYER_MOUNTS = 1 << 1,  /* own mount, IPC, UTS and network namespace, new tmpfs, own /proc; else a folder per slot */
    LAYER_UID = 1 << 2,     /* a uid of its own */
    LAYER_CGROUP = 1 << 3,
    LAYER_LANDLOCK = 1 << 4,
    LAYER_SECCOMP = 1 << 5,
};

/* The child writes it during set-up and unmaps it before the program's first byte runs. */
struct progress {
    int64_t step, error, ready_ns;
    int64_t cleared_ns, status, cpu_ns, ended_ns; /* written by the supervisor, if there is one */
};

struct rule { /* of Landlock, see landlock.c */
    char path[512];
    char access;
};

struct zygote_config { /* the same for all programs of one zygote */
    unsigned layers;
    int landlock_fd; /* one for all programs if their writable folder has the same path; else -1, and each makes its own */
    struct rule rules[64];
    int rule_count;
    char scratch[512]; /* parent of the slots' folders if there is no mount namespace */
    int64_t foreign_processes; /* others of the same uid, which RLIMIT_NPROC counts too; 0 if the uid is the sandbox's own */
    struct sock_fprog filter; /* the child adds it to the zygote's filter */
    int filter_error;         /* errno if the zygote's filter was refused */
    struct sock_fprog signal_filter; /* see signals.c; of length 0 where it is not needed */
    struct progress *progress; /* MAP_SHARED, one per slot */
    int faults;                /* honour request.fail_step */
    int64_t first_uid, last_uid; /* of programs; a slot with another uid is refused */
    int64_t base_address_space;
};

enum slot_state { SLOT_UNKNOWN, SLOT_FREE, SLOT_RUNNING, SLOT_ENDING };

/* Counters of a control group since its creation. */
struct oom_counts {
    int64_t kills;      /* processes killed because the group or the machine was out of memory */
    int64_t limit_hits; /* how often the group reached its limit (version 2); else -1 */
};

struct slot {
    enum slot_state state;
    int64_t uid;
    int cgroup[SLOT_FDS]; /* -1 where absent */
    char *stub_stack; /* NULL until the first program */
    /* the running program */
    struct request request;
    int fd[RUN_FDS];
    int network; /* network namespace, or -1 */
    pid_t child, stub;
    int child_reaped, stub_reaped, is_session;
    int64_t ended_by, status, cpu_ns, forked_ns, ended_ns, due_ns, processes_peak;
    struct oom_counts oom_counts_before;
    struct cpu_meter meter;
};

/* A process of a session: the first one, or a fork. All are children of the zygote (see forking.c): the zygote reaps each of
 * them, and the kernel reuses no pid before that. */
struct member {
    pid_t pid; /* 0: this entry is free */
    int slot;
    int64_t number; /* by which the worker names it */
    int leaf[LEAF_FDS]; /* of its own control group, or -1; see protocol.h */
    int by_pids;
    struct cpu_meter meter; /* of its cell */
    struct known_threads known;
};

/* Everything that the loop writes, on pages of its own: a write to a huge page that a child shares would split that page,
 * and every later fork would copy 512 small pages. For the same reason system calls of the loop that often fail bypass
 * errno. */
struct loop_state {
    int slots_known; /* highest known index + 1 */
    int running;     /* slots that `watch_all` looks at */
    int next_watched;
    int lingering_alive; /* lingering stubs that were not killed yet */
    int first_pending, pending; /* a ring in `pending_reports` */
    int64_t forks;
    int networks_idle;
    int networks[MAX_IDLE_NETWORKS];
    struct lingering_stub {
        pid_t stub; /* 0: this entry is free; its stack, if any, can be used again */
        int is_killed;
        char *stack;
    } lingering_stubs[MAX_LINGERING_STUBS];
    int control_fd, signal_fd, own_pidns_fd, own_mntns_fd, own_netns_fd;
    sigset_t python_signals;      /* the signal mask of Python, for children */
    struct slot slots[MAX_SLOTS]; /* the first ones share a page with the above: after a fork each written page is copied */
    struct report pending_reports[MAX_PENDING_REPORTS];
};

extern struct loop_state *loop;
extern struct zygote_config config;
extern struct progress *own_progress; /* in a child */

/* System calls without libc, for code that shares its memory, and so errno, with another process. */
#if defined(__x86_64__)
static inline long raw4(long n, long a, long b, long c, long d) {
    long r;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return r;
}
#elif defined(__aarch64__)
static inline long raw4(long n, long a, long b, long c, long d) {
    register long x8 __asm__("x8") = n;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}
#else
#error "this architecture is not supported: raw system calls are missing"
#endif

/* event_loop.c */
void *serve_loop(void);
void send_report(const struct report *report);
void report_not_started(struct request *request, int error);
/* program_start.c */
void close_all(int *fd, int count);
int is_watched(struct slot *s);
void *start_program(struct request *request, int *fd);
void give_back_network(struct slot *s);
/* program_end.c */
void end_program(struct slot *s, int by);
void reap(void);
/* init_stub.c */
int stub_main(void *argument);
char *new_stack(void);
struct lingering_stub *lingering_stub_by_pid(pid_t pid);
void kill_lingering_stubs(void);
int let_stub_linger(struct slot *s);
int reap_lingering_stub(pid_t pid);
/* session_members.c */
struct member *member_add(int slot, int64_t number, pid_t pid);
struct member *member_by_pid(pid_t pid);
/* Lists the pids of a session's members. Returns how many. */
int member_pids(int slot, pid_t *pids, int most);
/* Lists the processes or threads of a control group, by their ids in this process's own PID namespace. Returns how many. */
int list_ids(int list_fd, pid_t *ids, int most);
/* Kills the processes that it left. Call after it was reaped. */
void member_forget(struct member *m);
void handle_member_request(struct request *request, int *fd);
/* slot_counters.c */
int64_t now_ns(void);
int64_t read_number(int fd);
int write_number(int fd, int64_t number);
struct oom_counts read_oom_counts(struct slot *s);
int64_t oom_by(struct oom_counts before, struct oom_counts now);
void sample_processes(struct slot *s);
int exceeds_memory_limit(struct slot *s);
int64_t measure_starvation(struct slot *s, int64_t now);
int64_t file_size(int fd);
int64_t cpu_ns_of(struct rusage *u);
/* steps.c: confines the calling process and returns its page; NULL if a step failed, which `progress` names */
void *confine(struct slot *slot);
int send_descriptor(int socket_fd, int fd);
/* Without a mount namespace: removes the slot's folder with the last program's files. */
int clear_folder(struct slot *slot);
int step_count(void);
const char *step_name(int index);
/* small_objects.c: called in the zygote, after the imports */
void small_objects_prepare(void);
/* called in a child, before its first object */
void small_objects_open(void);
/* immortal.c: called in the zygote, after the imports. Returns how many objects became immortal. */
long make_all_immortal(void);
/* huge_pages.c */
int huge_pages_init(size_t most);
void huge_pages_settle(void);
void huge_pages_collapse(void);
/* forking.c: forks without libc's handlers and locks. With one thread they have nothing to do, and they write to shared pages,
 * which the kernel would then copy. */
void find_thread_addresses(void); /* once, before the first fork */
pid_t fork_without_libc(void);    /* as fork(2) */
pid_t fork_sibling(void);         /* in a session: as fork(2), but the parent is this process's parent */
/* supervisor.c: replaces the init stub where there is no PID namespace. Called in a process of its own: forks the program and
 * returns 0 in it; the supervisor does not return. It adopts the program's orphans, kills them when the program ends or on
 * SIGTERM, and reports. `pids_limit_fd`: the file with the slot's process limit, or -1. */
pid_t supervise(struct progress *progress, int pids_limit_fd);
extern int supervisor_fd; /* in the program: its socket to the supervisor */
/* signals.c */
/* In the program: adds the filter and sends the supervisor the descriptor at which the filter asks. */
int ask_for_signals(void);
/* In the supervisor: decides on one call. */
void answer_signal(int listener);
/* landlock.c */
/* The kernel's version of Landlock, or a lower one that `limit_landlock` has set; -1 without Landlock. */
int landlock_abi(void);
void limit_landlock(int abi);
int landlock_new_ruleset(void);
int landlock_allow(int ruleset, const char *path, char access);
/* folder.c: removes a folder and everything below it, if it exists. Follows no link: its contents may be hostile. */
int remove_folder(const char *path);
/* cpu_meter.c */
int has_one_thread(pid_t pid);
/* `usage_fd` and `threads_fd` are files of the control group: its CPU time and the list of its threads. Without a group (-1)
 * the caller uses `meter_one`. */
void meter_start(struct cpu_meter *m, int usage_fd, int64_t now);
void meter_know(struct known_threads *known, int threads_fd);
void meter_start_one(struct cpu_meter *m, pid_t program, int64_t now);
int64_t meter_group(struct cpu_meter *m, int usage_fd, int threads_fd, const struct known_threads *known, int64_t now);
/* `guardian` adopts the program's orphans; `own_children` of its children do not belong to the program. */
int64_t meter_one(struct cpu_meter *m, pid_t program, pid_t guardian, int own_children, int64_t now);
/* watchdog.c: replaces control groups where there are none */
void remember_own_memory(void); /* once, before the first fork */
/* Do `roots` and their descendants (and those of `other`, if not 0) use more than `most` bytes beyond the memory that they
 * share with the zygote? Sets `processes` to their number. */
int uses_more_memory(const pid_t *roots, int root_count, pid_t other, int64_t most, int64_t *processes);
/* Lists all descendants of a process. Returns how many. */
int list_descendants(pid_t pid, pid_t *pids, int most);
/* Sends SIGKILL to all descendants of a process. Returns how many there were. */
int kill_descendants(pid_t pid);
/* Returns the oldest child of a process, or 0. */
pid_t first_child(pid_t pid);
int count_children(pid_t pid);
/* Reads /proc/PID/NAME as a string. Returns its length, or -1. */
ssize_t read_proc_file(pid_t pid, const char *name, char *text, size_t size);
