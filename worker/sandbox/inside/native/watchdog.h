#ifndef WATCHDOG_H
#define WATCHDOG_H
#include <stdint.h>
#include <sys/types.h>
/* Where no control group counts. Called once before the first program is forked: */
void remember_own_memory(void);
/* Is more memory in use by `roots` and all below them (and all below `other`, if not 0) than `most`, beyond what is shared with
 * the warm parent? `processes` becomes their number. */
int uses_more_memory(const pid_t *roots, int root_count, pid_t other, int64_t most, int64_t *processes);
/* SIGKILL to all below a process, and not to itself; how many there were. */
int kill_descendants(pid_t pid);
/* The oldest child of a process; 0 if it has none. */
pid_t first_child(pid_t pid);
int count_children(pid_t pid);
/* Reads /proc/PID/NAME as a string; its length, or -1. */
ssize_t read_proc_file(pid_t pid, const char *name, char *text, size_t size);
#endif
