#pragma once
int landlock_abi(void);
int landlock_new_ruleset(void);
int landlock_allow(int ruleset, const char *path, char access);
