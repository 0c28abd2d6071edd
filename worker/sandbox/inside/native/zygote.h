/* The state of a zygote, and the functions that its parts offer each other. */
#pragma once
#include "sandbox.h"
#include "session_members.h"
#include <signal.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#define MAX_SLOTS 1024
#define EXIT_NOT_CONFINED 253
#define MAX_IDLE_NETWORKS 16 /* most of the time no more programs than this run in one zygote */
#define MAX_PENDING_REPORTS (MAX_SLOTS + MAX_MEMBERS + 1) /* one end of each, and the answer to one request */

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
