/* Forks without libc's handlers and locks: with one thread they have nothing to do, and they write to shared pages, which
 * the kernel would then copy. */
#pragma once
#include <sys/types.h>

/* Call once, before the first fork. */
void find_thread_addresses(void);
/* As fork(2). */
pid_t fork_without_libc(void);
/* In a session: a fork whose parent is this process's parent. As fork(2). */
pid_t fork_sibling(void);
