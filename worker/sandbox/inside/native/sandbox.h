/* One sandboxed program: what the zygote knows of it (slot), and the confinement that the child puts on (steps.c). */
#ifndef SANDBOX_H
#define SANDBOX_H
#include "cpu_meter.h"
#include "protocol.h"
#include <linux/filter.h>
#include <sys/types.h>

/* Layers that the tier's probe found working. A layer that is on and fails means that the program does not run. */
enum {
    LAYER_PIDNS = 1 << 0,   /* own PID namespace with an init stub; without it a keeper process */
    LAYER_MOUNTS = 1 << 1,  /* own mount, IPC, UTS and network namespace, fresh tmpfs, own /proc; without it a folder of its own */
    LAYER_UID = 1 << 2,     /* a uid of its own */
    LAYER_CGROUP = 1 << 3,
    LAYER_LANDLOCK = 1 << 4,
    LAYER_SECCOMP = 1 << 5,
};

/* Written by the child while it prepares itself, unmapped before the program's first byte runs. */
struct progress {
    int64_t step, error, ready_ns;
    int64_t cleared_ns, status, cpu_ns, ended_ns; /* written by the keeper, where there is one */
};

struct rule { /* of Landlock, see landlock.c */
    char path[512];
    char access;
};

struct house { /* what all programs of one zygote share */
    unsigned layers;
    int landlock_fd; /* made once, where the writable folder has the same path for all; else -1, and made per program */
    struct rule rules[64];
    int rule_count;
    char scratch[512]; /* where folders are made if there is no mount namespace */
    int64_t foreign_processes; /* of the same uid, counted by RLIMIT_NPROC too; 0 if the uid is the sandbox's own */
    struct sock_fprog filter; /* what a child adds to the zygote's */
    int filter_error;         /* if the zygote's could not be put on */
    struct progress *progress; /* MAP_SHARED, one per slot */
    int faults;                /* honour ask.fail_step */
    int64_t first_uid, last_uid; /* of programs; a slot with another uid is refused */
    int64_t base_address_space;
};

enum slot_state { SLOT_UNKNOWN, SLOT_FREE, SLOT_RUNNING, SLOT_ENDING };

/* Of a control group, since it was made. */
struct ooms {
    int64_t kills;      /* processes that the kernel killed for want of memory, its own or the machine's */
    int64_t limit_hits; /* how often it reached its own limit, which version 2 counts; else -1 */
};

struct slot {
    enum slot_state state;
    int64_t uid;
    int cgroup[SLOT_FDS]; /* -1 where absent */
    char *stub_stack; /* NULL until one is needed */
    /* of the running program */
    struct ask ask;
    int fd[RUN_FDS];
    int network; /* its network namespace; -1 where it has none of its own */
    pid_t child, stub;
    int child_reaped, stub_reaped, is_session;
    int64_t ended_by, status, cpu_ns, forked_ns, ended_ns, due_ns, processes_peak;
    struct ooms ooms_before;
    struct cpu_meter meter;
};

#define STACK_BYTES 16384
#define WORKSPACE "/w/call" /* jail.py */
#define LEAVERS_MOST 24 /* stubs of programs that are over; they count as processes of their uid */
#define PAGE_BYTES 65536 /* page.py */
#define SESSION_FORKS 160 /* processes of a session beyond its limit that RLIMIT_NPROC allows for forks and checkpoints */
#define FIRST_FREE_FD 10 /* below are fillers, so that no received descriptor collides with the child's final numbers */
enum { CHILD_FD_PAYLOAD = 3, CHILD_FD_LANDLOCK = 4, CHILD_FD_BINARY = 5, CHILD_FD_CONTROL = 6 };

int64_t now_ns(void);
/* Confine the calling process. Returns 0, or the 1-based number of the step that failed. */
int confine(struct house *house, struct slot *slot, int index, void **page);
/* Where there is no mount namespace: remove the slot's folder, with what the last program left in it. */
int clear_folder(struct house *house, struct slot *slot);
int step_count(void);
const char *step_name(int index);
#endif
