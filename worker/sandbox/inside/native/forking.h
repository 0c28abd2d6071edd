/* Forking without libc's handlers and locks. They write to pages that parent and child share, and which then have to be copied; and
 * there is one thread, so they have nothing to do. */
#ifndef FORKING_H
#define FORKING_H
#include <sys/types.h>

/* Once, before anything is forked. */
void learn_thread_addresses(void);
/* As fork(2). */
pid_t fork_alone(void);
/* In a session: a fork that is a child of this process's own parent. As fork(2). */
pid_t fork_beside(void);
#endif
