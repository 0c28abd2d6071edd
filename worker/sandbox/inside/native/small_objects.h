#ifndef NURSERY_H
#define NURSERY_H
/* In the zygote, after the imports. */
void nursery_prepare(void);
/* In a child, before its first object. */
void nursery_open(void);
#endif
