/* The state of a zygote and the parts that work on it. */
#pragma once
#include "sandbox.h"
#include "session_members.h"
#include <signal.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#define MAX_SLOTS 1024
#define EXIT_NOT_CONFINED 253
#define NETWORKS_KEPT 16 /* as many as programs run at a time here, most of the time */
#define SAYS_MOST (MAX_SLOTS + MOST_MEMBERS + 1) /* an end of each, and the answer to one request */

/* What the loop writes to, on pages of its own: a write to a huge page that a child shares would break it up, and each later fork
 * would have 512 small pages to copy. For the same reason the loop's system calls leave errno alone where they often fail. */
struct book {
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
};

extern struct book *book;
extern struct house house;
extern int control_fd, signal_fd, own_pidns_fd, own_mntns_fd, own_netns_fd;
extern sigset_t python_signals;
extern struct progress *own_progress; /* in a child */

/* event_loop.c */
void *serve_loop(void);
/* program_start.c */
void close_all(int *fd, int count);
int is_watched(struct slot *s);
void *start(struct ask *ask, int *fd);
/* program_end.c */
void end(struct slot *s, int by);
void reap(void);
/* init_stub.c */
int stub_main(void *argument);
char *new_stack(void);
struct leaver *leaver_by_pid(pid_t pid);
void dismiss_leavers(void);
int let_leave(struct slot *s);
int has_left(pid_t pid);
/* network_namespaces.c */
int take_network(struct slot *s);
void give_back_network(struct slot *s);
/* reports.c */
void say(const struct say *message);
void send_waiting_says(void);
void say_not_started(struct ask *ask, int step, int error);
/* session_requests.c */
void obey_about_member(struct ask *ask, int *fd);
/* slot_counters.c */
int64_t read_number(int fd);
int write_number(int fd, int64_t number);
struct ooms read_ooms(struct slot *s);
int64_t oom_by(struct ooms before, struct ooms now);
void sample_processes(struct slot *s);
int too_much_memory(struct slot *s);
int64_t look_at_cpu(struct slot *s, int64_t now);
int64_t file_size(int fd);
int64_t cpu_ns_of(struct rusage *u);
