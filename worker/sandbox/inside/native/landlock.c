/* The Landlock ruleset of every program. The structs are defined here because distribution headers lag behind the kernel. */
#include "zygote.h"
#include <limits.h>

struct ruleset_attr {
    uint64_t handled_fs, handled_net, scoped;
};
struct __attribute__((packed)) path_beneath_attr {
    uint64_t allowed;
    int32_t parent_fd;
};

enum {
    FS_EXECUTE = 1 << 0, FS_WRITE_FILE = 1 << 1, FS_READ_FILE = 1 << 2, FS_READ_DIR = 1 << 3, FS_MAKE_CHAR = 1 << 6,
    FS_MAKE_BLOCK = 1 << 11, FS_REFER = 1 << 13, FS_TRUNCATE = 1 << 14, FS_IOCTL_DEV = 1 << 15,
};
#define FS_ALL_ABI1 ((1ULL << 13) - 1)
#define NET_BIND_AND_CONNECT_TCP 3ULL
#define SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS 3ULL

static int most_abi = INT_MAX;

void limit_landlock(int abi) { most_abi = abi; }

int landlock_abi(void) {
    int abi = (int)syscall(SYS_landlock_create_ruleset, NULL, 0, 1);
    return abi < most_abi ? abi : most_abi;
}

static uint64_t handled_fs(int abi) {
    uint64_t all = FS_ALL_ABI1;
    if (abi >= 2) all |= FS_REFER;
    if (abi >= 3) all |= FS_TRUNCATE;
    if (abi >= 5) all |= FS_IOCTL_DEV;
    return all;
}

int landlock_new_ruleset(void) {
    int abi = landlock_abi();
    if (abi < 1)
        return -1;
    struct ruleset_attr attr = {.handled_fs = handled_fs(abi)};
    size_t size = 8;
    if (abi >= 4) { attr.handled_net = NET_BIND_AND_CONNECT_TCP; size = 16; }
    if (abi >= 6) { attr.scoped = SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS; size = 24; }
    return (int)syscall(SYS_landlock_create_ruleset, &attr, size, 0);
}

/* access: 'r' read and execute, 'd' read and write an existing file (a device), 'w' everything but device nodes. */
int landlock_allow(int ruleset, const char *path, char access) {
    uint64_t all = handled_fs(landlock_abi());
    uint64_t read = FS_EXECUTE | FS_READ_FILE | FS_READ_DIR;
    struct path_beneath_attr rule = {.parent_fd = open(path, O_PATH | O_CLOEXEC)};
    if (rule.parent_fd < 0)
        return -1;
    if (access == 'w')
        rule.allowed = all & ~(uint64_t)(FS_MAKE_CHAR | FS_MAKE_BLOCK);
    else if (access == 'd')
        rule.allowed = (FS_READ_FILE | FS_WRITE_FILE | FS_TRUNCATE) & all;
    else
        rule.allowed = read;
    long failed = syscall(SYS_landlock_add_rule, ruleset, 1, &rule, 0);
    if (failed && errno == EINVAL) { /* a file has no READ_DIR right */
        rule.allowed &= ~(uint64_t)FS_READ_DIR;
        failed = syscall(SYS_landlock_add_rule, ruleset, 1, &rule, 0);
    }
    close(rule.parent_fd);
    return failed ? -1 : 0;
}
