#define _GNU_SOURCE
#include "folder.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int remove_entry(int parent, const char *name);

static int empty_folder(int fd) {
    DIR *folder = fdopendir(fd); /* takes fd */
    if (!folder)
        return close(fd), -1;
    int failed = 0;
    for (struct dirent *entry; (entry = readdir(folder));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            failed |= remove_entry(dirfd(folder), entry->d_name);
    closedir(folder);
    return failed;
}

static int remove_entry(int parent, const char *name) {
    if (!unlinkat(parent, name, 0) || errno == ENOENT)
        return 0;
    int fd = openat(parent, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -1;
    char own[32];
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    chmod(own, 0700); /* its owner may have locked it */
    int readable = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    close(fd);
    if (readable < 0 || empty_folder(readable))
        return -1;
    return unlinkat(parent, name, AT_REMOVEDIR);
}

int remove_folder(const char *path) { return remove_entry(AT_FDCWD, path); }
