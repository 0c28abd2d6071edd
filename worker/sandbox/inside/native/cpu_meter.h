/* Measures how long a program starved: runnable, but without a CPU. Its wall time is the elapsed time minus `starved`.
 *
 * C is the CPU time of its control group, run and wait are the two counters of a thread (schedstat), all since the start:
 *
 *     starved = the largest value so far of max(0, max over its threads (run + wait) - C)
 *
 * A sleeping thread gains nothing. Many threads gain nothing either: while one waits, the others use CPU time. Threads are
 * sampled every 50 ms; the wait between the last sample of a thread and its end is unknown and counts as wall time.
 *
 * Without control groups no counter has the CPU time of ended processes. There, only the wait of a single-threaded program
 * counts, and nothing more after the first sample at which it has a second thread or process. */
#pragma once
#include <stdint.h>
#include <sys/types.h>

#define MAX_KNOWN_THREADS 16

struct cpu_meter {
    int64_t usage_before_ns; /* of the control group, or of the one thread, at the start */
    int64_t one_before_ns;   /* run + wait of the one thread at the start, if it was there before */
    int64_t started_ns, starved_ns;
    int64_t top_ns, top_since_ns; /* the longest run + wait, and when that value was first seen */
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

/* `usage_fd` and `threads_fd` are files of the control group: its CPU time and the list of its threads. Without a group (-1)
 * the caller uses `meter_one`. */
void meter_start(struct cpu_meter *m, int usage_fd, int64_t now);
void meter_know(struct known_threads *known, int threads_fd);
void meter_start_one(struct cpu_meter *m, pid_t program, int64_t now);
int64_t meter_group(struct cpu_meter *m, int usage_fd, int threads_fd, const struct known_threads *known, int64_t now);
/* `guardian` adopts the program's orphans; `own_children` of its children do not belong to the program. */
int64_t meter_one(struct cpu_meter *m, pid_t program, pid_t guardian, int own_children, int64_t now);
