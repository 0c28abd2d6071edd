#ifndef WATCHDOG_H
#define WATCHDOG_H
#include <stdint.h>
#include <sys/types.h>
/* Where no control group counts: is more memory in use by `root` and all below it (and `other` and all below it, if not 0) than
 * `most`, beyond what each process shares with its warm parent? */
int uses_more_memory(pid_t root, pid_t other, int64_t most);
#endif
