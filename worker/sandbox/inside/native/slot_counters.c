/* The kernel's counters of a slot. The runner opened the files that they are read from. */
#include "zygote.h"

int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int read_text(int fd, char *text, size_t size) {
    ssize_t n = fd < 0 ? -1 : pread(fd, text, size - 1, 0);
    text[n > 0 ? n : 0] = 0;
    return n > 0;
}

static int64_t number_after(const char *text, const char *name, int64_t otherwise) {
    const char *at = strstr(text, name);
    return at ? strtoll(at + strlen(name), NULL, 10) : otherwise;
}

int64_t read_number(int fd) {
    char text[32];
    return read_text(fd, text, sizeof text) ? strtoll(text, NULL, 10) : 0;
}

struct oom_counts read_oom_counts(struct slot *s) {
    char text[512];
    read_text(s->cgroup[CG_MEMORY_EVENTS], text, sizeof text);
    return (struct oom_counts){number_after(text, "\noom_kill ", 0), number_after(text, "\noom ", -1)};
}

/* Which limit made the kernel kill a process of the slot: the slot's own, or that of the machine or pod. */
int64_t oom_by(struct oom_counts before, struct oom_counts now) {
    if (now.kills == before.kills || now.limit_hits < 0)
        return OOM_BY_UNKNOWN;
    return now.limit_hits > before.limit_hits ? OOM_BY_LIMIT : OOM_BY_MACHINE;
}

int write_number(int fd, int64_t number) {
    char text[24];
    int n = snprintf(text, sizeof text, "%lld", (long long)number);
    return fd < 0 || pwrite(fd, text, (size_t)n, 0) == n ? 0 : -1;
}

static void note_processes(struct slot *s, int64_t n) {
    if (n > s->processes_peak)
        s->processes_peak = n;
}

void sample_processes(struct slot *s) { note_processes(s, read_number(s->cgroup[CG_PIDS_NOW])); }

/* For slots without a control group. The supervisor, if there is one, does not count. */
int exceeds_memory_limit(struct slot *s) {
    int64_t processes = 0;
    pid_t roots[256];
    int count = s->is_session ? member_pids((int)(s - loop->slots), roots, 256) : 1;
    if (!s->is_session || !count)
        roots[0] = s->child, count = 1;
    int too_much = uses_more_memory(roots, count, s->stub, s->request.memory_bytes, &processes);
    note_processes(s, s->stub ? processes : processes - 1);
    return too_much;
}

/* How long the program has starved so far. The stub adopts orphans and has no children of its own; the supervisor has one
 * child. */
int64_t measure_starvation(struct slot *s, int64_t now) {
    if (s->cgroup[CG_CPU_USAGE] >= 0)
        return meter_group(&s->meter, s->cgroup[CG_CPU_USAGE], s->cgroup[CG_THREADS], NULL, now);
    return s->stub ? meter_one(&s->meter, s->child, s->stub, 0, now)
                   : meter_one(&s->meter, first_child(s->child), s->child, 1, now);
}

int64_t file_size(int fd) {
    struct stat st;
    return fd < 0 || fstat(fd, &st) ? 0 : st.st_size;
}

int64_t cpu_ns_of(struct rusage *u) {
    return (u->ru_utime.tv_sec + u->ru_stime.tv_sec) * 1000000000LL + (u->ru_utime.tv_usec + u->ru_stime.tv_usec) * 1000LL;
}
