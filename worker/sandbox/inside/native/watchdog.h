#ifndef WATCHDOG_H
#define WATCHDOG_H
#include <stdint.h>
#include <sys/types.h>
/* Where no control group counts. Called once before the first program is forked: */
void remember_own_memory(void);
/* Is more memory in use by `root` and all below it (and all below `other`, if not 0) than `most`, beyond what is shared with the
 * warm parent? `processes` becomes their number. */
int uses_more_memory(pid_t root, pid_t other, int64_t most, int64_t *processes);
#endif
