#pragma once
#include <stdint.h>
#include <sys/types.h>
/* Replaces control groups where there are none. Call once, before the first fork: */
void remember_own_memory(void);
/* Do `roots` and their descendants (and those of `other`, if not 0) use more than `most` bytes beyond the memory that they
 * share with the zygote? Sets `processes` to their number. */
int uses_more_memory(const pid_t *roots, int root_count, pid_t other, int64_t most, int64_t *processes);
/* Sends SIGKILL to all descendants of a process. Returns how many there were. */
int kill_descendants(pid_t pid);
/* Returns the oldest child of a process, or 0. */
pid_t first_child(pid_t pid);
int count_children(pid_t pid);
/* Reads /proc/PID/NAME as a string. Returns its length, or -1. */
ssize_t read_proc_file(pid_t pid, const char *name, char *text, size_t size);
