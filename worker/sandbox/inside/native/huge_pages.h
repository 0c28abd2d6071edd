#ifndef HEAP_H
#define HEAP_H
#include <stddef.h>
int heap_init(size_t most);
void heap_settle(void);
void heap_mend(void);
#endif
