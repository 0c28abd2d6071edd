#pragma once
/* Call in the zygote, after the imports. */
void small_objects_prepare(void);
/* Call in a child, before its first object. */
void small_objects_open(void);
