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
#include "zygote.h"

#define MAX_THREADS 256 /* sampled threads; a program with more gains nothing anyway */

/* Version 1 has nanoseconds, version 2 a list that begins with "usage_usec". Returns -1 if it cannot be read. */
static int64_t usage_ns(int fd) {
    char text[64];
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    if (n <= 0)
        return -1;
    text[n] = 0;
    const char *number = strchr(text, ' ');
    return number ? 1000 * strtoll(number, NULL, 10) : strtoll(text, NULL, 10);
}

/* The first two counters of schedstat: time on a CPU, and run-queue wait. The kernel adds a wait when it ends. */
static int64_t busy_ns(pid_t thread, int64_t *run_ns) {
    char text[64], *wait;
    if (read_proc_file(thread, "schedstat", text, sizeof text) <= 0)
        return 0;
    *run_ns = strtoll(text, &wait, 10);
    return *run_ns + strtoll(wait, NULL, 10);
}

static int is_runnable(pid_t thread) {
    char text[512];
    const char *name_end = read_proc_file(thread, "stat", text, sizeof text) > 0 ? strrchr(text, ')') : NULL;
    return name_end && name_end[1] == ' ' && name_end[2] == 'R';
}

void meter_start(struct cpu_meter *m, int usage_fd, int64_t now) {
    *m = (struct cpu_meter){.usage_before_ns = usage_fd < 0 ? 0 : usage_ns(usage_fd), .started_ns = now};
}

void meter_start_one(struct cpu_meter *m, pid_t program, int64_t now) {
    int64_t run_ns = 0, busy = busy_ns(program, &run_ns);
    *m = (struct cpu_meter){.usage_before_ns = run_ns, .one_before_ns = busy, .started_ns = now};
}

void meter_know(struct known_threads *known, int threads_fd) {
    pid_t ids[MAX_KNOWN_THREADS + 1];
    int64_t run_ns;
    int count = list_ids(threads_fd, ids, MAX_KNOWN_THREADS + 1);
    known->is_full = count > MAX_KNOWN_THREADS;
    known->count = count - known->is_full;
    for (int i = 0; i < known->count; i++)
        known->threads[i] = (struct known_thread){ids[i], busy_ns(ids[i], &run_ns)};
}

/* Returns -1 for a thread that may be older than the start and was not remembered. */
static int64_t known_ns(const struct known_threads *known, pid_t thread) {
    for (int i = 0; known && i < known->count; i++)
        if (known->threads[i].id == thread)
            return known->threads[i].ns;
    return known && known->is_full ? -1 : 0;
}

/* The counters do not have a wait that continues. A thread that was runnable when its counters were last seen, and is runnable with
 * the same counters now, has waited since then: to sleep in between, it would have had to run. */
static int64_t unfinished_wait(struct cpu_meter *m, pid_t top, int64_t top_ns, int64_t now) {
    int stands_still = top == m->top && top_ns == m->top_ns;
    m->top = top, m->top_ns = top_ns;
    if (!top || !is_runnable(top))
        m->waits_since_ns = 0;
    else if (!stands_still || !m->waits_since_ns)
        m->waits_since_ns = now;
    return m->waits_since_ns ? now - m->waits_since_ns : 0;
}

static int64_t update(struct cpu_meter *m, pid_t top, int64_t top_ns, int64_t used_ns, int64_t now) {
    int64_t wanted = top_ns + unfinished_wait(m, top, top_ns, now), elapsed = now - m->started_ns;
    int64_t starved = (wanted < elapsed ? wanted : elapsed) - used_ns;
    if (starved > m->starved_ns)
        m->starved_ns = starved;
    return m->starved_ns;
}

int64_t meter_group(struct cpu_meter *m, int usage_fd, int threads_fd, const struct known_threads *known, int64_t now) {
    pid_t ids[MAX_THREADS], top = 0;
    int64_t top_ns = 0, run_ns;
    for (int i = list_ids(threads_fd, ids, MAX_THREADS) - 1; i >= 0; i--) {
        int64_t before = known_ns(known, ids[i]), since = before < 0 ? 0 : busy_ns(ids[i], &run_ns) - before;
        if (since > top_ns)
            top = ids[i], top_ns = since;
    }
    int64_t usage = usage_ns(usage_fd);
    if (usage < 0 || m->usage_before_ns < 0) /* its usage is unknown, so nothing is subtracted */
        return m->starved_ns;
    return update(m, top, top_ns, usage - m->usage_before_ns, now);
}

int has_one_thread(pid_t pid) {
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    return !stat(path, &st) && st.st_nlink == 3; /* one for each thread, and two of its own */
}

int64_t meter_one(struct cpu_meter *m, pid_t program, pid_t guardian, int own_children, int64_t now) {
    if (!has_one_thread(program) || count_children(program) || count_children(guardian) > own_children)
        m->has_company = 1;
    if (m->has_company)
        return m->starved_ns;
    int64_t run_ns = 0, busy = busy_ns(program, &run_ns);
    return update(m, program, busy - m->one_before_ns, run_ns - m->usage_before_ns, now);
}
