/* One sandboxed program: its slot in the zygote, and the confinement of its process (steps.c). */
#pragma once
#include "cpu_meter.h"
#include "protocol.h"
#include <linux/filter.h>
#include <sys/types.h>

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

#define STACK_BYTES 16384
#define WORKSPACE "/w/call" /* jail.py */
#define MAX_LINGERING_STUBS 24 /* RLIMIT_NPROC counts them as processes of their uid */
#define PAGE_BYTES 65536 /* page.py */
#define SESSION_FORKS 160 /* RLIMIT_NPROC allows a session this many more processes, for forks and checkpoints */
#define FIRST_FREE_FD 10 /* lower numbers are fillers: no received descriptor collides with the child's final numbers */
enum { CHILD_FD_PAYLOAD = 3, CHILD_FD_LANDLOCK = 4, CHILD_FD_BINARY = 5, CHILD_FD_CONTROL = 6 };

int64_t now_ns(void);
/* Confine the calling process. Returns 0, or the 1-based number of the step that failed. */
int confine(struct zygote_config *config, struct slot *slot, int index, void **page);
/* Without a mount namespace: removes the slot's folder with the last program's files. */
int clear_folder(struct zygote_config *config, struct slot *slot);
int step_count(void);
const char *step_name(int index);
