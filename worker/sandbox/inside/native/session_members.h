/* The processes of sessions: the first one of each, and its forks. All of them are the zygote's own children (see forking.h),
 * so that it learns how each ends, and no pid is used again before it has. */
#ifndef MEMBERS_H
#define MEMBERS_H
#include "cpu_meter.h"
#include <stdint.h>
#include <sys/types.h>

#define MOST_MEMBERS 4096

struct member {
    pid_t pid; /* 0: this place is free */
    int slot;
    int64_t number; /* the worker's name for it */
    int leaf_processes, leaf_kill, leaf_usage, leaf_threads; /* of its own control group, or -1; see protocol.h */
    int by_pids;
    struct cpu_meter meter; /* of its cell */
    struct known_threads known;
};

struct member *member_add(int slot, int64_t number, pid_t pid);
struct member *member_by_pid(pid_t pid);
struct member *member_by_number(int64_t number);
int members_of(int slot);
/* Lists the pids of a session's members; how many. */
int member_pids(int slot, pid_t *pids, int most);
/* Moves `program`, which is the member or what its keeper keeps, into a control group of its own, whose descriptors become the
 * member's; or sees that it is there. */
int member_enter_leaf(struct member *m, pid_t program, const int *leaf, int flags);
/* Calls `act` for each process or thread in a list of a control group; how many there were. */
int for_listed(int list_fd, void (*act)(pid_t id, void *about), void *about);
/* Kills it with all that it has started, and nothing else. */
void member_kill(struct member *m);
/* Kills what it has left behind. Call when it was reaped. */
void member_forget(struct member *m);
/* Who sent the message that waits in this socket, by the kernel's word; -1 if there is none. */
pid_t sender_of_hello(int fd, int64_t *uid);
#endif
