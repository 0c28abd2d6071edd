/* How long a program wanted a CPU while others had it: `starved`. Its wall time is what has elapsed, less that.
 *
 * C is the CPU time of its control group, run and wait are the two counters of a thread (schedstat), all since the start:
 *
 *     starved = the largest value so far of max(0, max over its threads (run + wait) - C)
 *
 * A thread that sleeps gains nothing, and neither does a crowd: what one of its threads waits, the others use. Threads are looked
 * at every 50 ms; what a thread waited between the last look at it and its end is not known and counts as time that it had.
 *
 * Without control groups nobody counts the CPU time of processes that have ended. There, only the wait of a program's one thread
 * counts, and nothing more from the first look on at which it has a second thread or process. */
#ifndef CPU_METER_H
#define CPU_METER_H
#include <stdint.h>
#include <sys/types.h>

#define METER_KNOWN_MOST 16

struct cpu_meter {
    int64_t usage_before_ns; /* of the control group, or of the one thread, at the start */
    int64_t one_before_ns;   /* run + wait of the one thread at the start, if it was there before */
    int64_t started_ns, starved_ns;
    int64_t top_ns, top_since_ns; /* the longest run + wait, and when it was first seen so */
    pid_t top;                    /* the thread that has it */
    int has_company;              /* without control groups: it is, or was, more than one thread */
};

/* A session's threads at the start of a cell: what they ran and waited before is not the cell's. */
struct known_threads {
    int count, is_full; /* full: there may have been more, so a thread that is not here cannot be told from a new one */
    struct known_thread {
        pid_t id;
        int64_t ns;
    } threads[METER_KNOWN_MOST];
};

/* `usage_fd` and `threads_fd` are files of the control group: its CPU time and the list of its threads. Without a group (-1) the
 * caller looks with `meter_one`. */
void meter_start(struct cpu_meter *m, int usage_fd, int64_t now);
void meter_know(struct known_threads *known, int threads_fd);
void meter_start_one(struct cpu_meter *m, pid_t program, int64_t now);
int64_t meter_group(struct cpu_meter *m, int usage_fd, int threads_fd, const struct known_threads *known, int64_t now);
/* `guardian` adopts what the program's processes leave behind; `own_children` of it are not the program's offspring. */
int64_t meter_one(struct cpu_meter *m, pid_t program, pid_t guardian, int own_children, int64_t now);
#endif
