#pragma once
#include "sandbox.h"
/* Replaces the init stub where there is no PID namespace. Called in a process of its own: forks the program and returns 0 in
 * it; the supervisor does not return. It adopts the program's orphans, kills them when the program ends or on SIGTERM, and
 * reports. `pids_limit_fd`: the file with the slot's process limit, or -1. */
pid_t supervise(struct progress *progress, int pids_limit_fd);
