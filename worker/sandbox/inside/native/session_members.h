/* The processes of sessions: the first one of each, and its forks. All are children of the zygote (see forking.c): the
 * zygote reaps each of them, and the kernel reuses no pid before that. */
#pragma once
#include "cpu_meter.h"
#include <stdint.h>
#include <sys/types.h>

#define MAX_MEMBERS 4096

struct member {
    pid_t pid; /* 0: this entry is free */
    int slot;
    int64_t number; /* by which the worker names it */
    int leaf_processes, leaf_kill, leaf_usage, leaf_threads; /* of its own control group, or -1; see protocol.h */
    int by_pids;
    struct cpu_meter meter; /* of its cell */
    struct known_threads known;
};

struct member *member_add(int slot, int64_t number, pid_t pid);
struct member *member_by_pid(pid_t pid);
struct member *member_by_number(int64_t number);
int members_of(int slot);
/* Lists the pids of a session's members. Returns how many. */
int member_pids(int slot, pid_t *pids, int most);
/* Moves `program` (the member, or the child of its supervisor) into a control group of its own, or checks that it is there. The
 * member owns the descriptors from then on. */
int member_enter_leaf(struct member *m, pid_t program, const int *leaf, int flags);
/* Calls `act` for each process or thread that a control group lists. Returns how many. */
int for_each_listed(int list_fd, void (*act)(pid_t id, void *about), void *about);
/* Kills it and the processes that it started, and nothing else. */
void member_kill(struct member *m);
/* Kills the processes that it left. Call after it was reaped. */
void member_forget(struct member *m);
/* The sender of the message in this socket, from the kernel's credentials; -1 if there is none. */
pid_t hello_sender(int fd, int64_t *uid);
