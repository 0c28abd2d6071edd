/* The state of a zygote, and the functions that its parts offer each other. */
#pragma once
#include "sandbox.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
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

/* event_loop.c */
void *serve_loop(void);
/* program_start.c */
void close_all(int *fd, int count);
int is_watched(struct slot *s);
void *start_program(struct request *request, int *fd);
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
/* network_namespaces.c */
int take_network(struct slot *s);
void give_back_network(struct slot *s);
/* reports.c */
void send_report(const struct report *report);
void send_pending_reports(void);
void report_not_started(struct request *request, int step, int error);
/* session_members.c */
struct member *member_add(int slot, int64_t number, pid_t pid);
struct member *member_by_pid(pid_t pid);
/* Lists the pids of a session's members. Returns how many. */
int member_pids(int slot, pid_t *pids, int most);
/* Calls `act` for each process or thread that a control group lists. Returns how many. */
int for_each_listed(int list_fd, void (*act)(pid_t id, void *about), void *about);
/* Kills the processes that it left. Call after it was reaped. */
void member_forget(struct member *m);
void handle_member_request(struct request *request, int *fd);
/* slot_counters.c */
int64_t read_number(int fd);
int write_number(int fd, int64_t number);
struct oom_counts read_oom_counts(struct slot *s);
int64_t oom_by(struct oom_counts before, struct oom_counts now);
void sample_processes(struct slot *s);
int exceeds_memory_limit(struct slot *s);
int64_t measure_starvation(struct slot *s, int64_t now);
int64_t file_size(int fd);
int64_t cpu_ns_of(struct rusage *u);
/* small_objects.c: called in the zygote, after the imports */
void small_objects_prepare(void);
/* called in a child, before its first object */
void small_objects_open(void);
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
/* landlock.c */
int landlock_abi(void);
int landlock_new_ruleset(void);
int landlock_allow(int ruleset, const char *path, char access);
/* folder.c: removes a folder and everything below it, if it exists. Follows no link: its contents may be hostile. */
int remove_folder(const char *path);
/* cpu_meter.c (see cpu_meter.h): /proc/PID/task has one link for each thread, and two of its own */
int has_one_thread(pid_t pid);
/* watchdog.c: replaces control groups where there are none */
void remember_own_memory(void); /* once, before the first fork */
/* Do `roots` and their descendants (and those of `other`, if not 0) use more than `most` bytes beyond the memory that they
 * share with the zygote? Sets `processes` to their number. */
int uses_more_memory(const pid_t *roots, int root_count, pid_t other, int64_t most, int64_t *processes);
/* Sends SIGKILL to all descendants of a process. Returns how many there were. */
int kill_descendants(pid_t pid);
/* Returns the oldest child of a process, or 0. */
pid_t first_child(pid_t pid);
int count_children(pid_t pid);
/* Reads /proc/PID/NAME as a string. Returns its length, or -1. */
ssize_t read_proc_file(pid_t pid, const char *name, char *text, size_t size);
