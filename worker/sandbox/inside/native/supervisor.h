#ifndef KEEPER_H
#define KEEPER_H
#include "sandbox.h"
/* Where there is no PID namespace. Called in a process of its own: forks the program and returns 0 in it; the keeper itself does
 * not return. It adopts whatever the program leaves behind, kills it when the program ends or on SIGTERM, and reports.
 * `pids_limit_fd`: the limit of the slot's processes, or -1. */
pid_t keep(struct progress *progress, int pids_limit_fd);
#endif
