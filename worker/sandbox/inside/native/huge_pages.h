#pragma once
#include <stddef.h>
int huge_pages_init(size_t most);
void huge_pages_settle(void);
void huge_pages_collapse(void);
