#include "zygote.h"
#include <dirent.h>

/* Mount points are never entered: their contents do not belong to the folder. */
static int is_mount_point(int fd) {
    struct statx info;
    return statx(fd, "", AT_EMPTY_PATH, STATX_TYPE, &info) || info.stx_attributes & STATX_ATTR_MOUNT_ROOT;
}

static DIR *open_folder(int parent, const char *name) {
    int fd = openat(parent, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    if (is_mount_point(fd)) {
        close(fd);
        errno = EBUSY;
        return NULL;
    }
    char own[32];
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    chmod(own, 0700); /* the program may have removed all permissions */
    int readable = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    close(fd);
    if (readable < 0)
        return NULL;
    DIR *folder = fdopendir(readable); /* owns `readable` from here on */
    if (!folder)
        close(readable);
    return folder;
}

static struct dirent *next_entry(DIR *folder) {
    struct dirent *entry;
    while ((entry = readdir(folder)) && (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")))
        ;
    return entry;
}

/* Moves an entry into `top`, under a name that is free there. */
static int move_up(int top, int from, const char *name, unsigned *number) {
    char free_name[16];
    DIR *unlocked = open_folder(from, name); /* rename needs write permission on the folder, to change its `..` */
    if (!unlocked)
        return -1;
    closedir(unlocked);
    int failed;
    do
        snprintf(free_name, sizeof free_name, "%u", (*number)++);
    while ((failed = renameat2(from, name, top, free_name, RENAME_NOREPLACE)) && errno == EEXIST);
    return failed;
}

/* Moves the subfolders of a folder in `top` up into `top`, then removes it: two descriptors at any depth. */
static int remove_below(int top, const char *name, unsigned *number) {
    DIR *folder = open_folder(top, name);
    if (!folder)
        return -1;
    int failed = 0;
    for (struct dirent *entry; !failed && (entry = next_entry(folder));)
        if (unlinkat(dirfd(folder), entry->d_name, 0))
            failed = move_up(top, dirfd(folder), entry->d_name, number);
    closedir(folder);
    return failed ? -1 : unlinkat(top, name, AT_REMOVEDIR);
}

/* One pass over the entries of `top`. Returns how many there were, or -1. */
static int remove_entries(DIR *top, unsigned *number) {
    int seen = 0;
    rewinddir(top);
    for (struct dirent *entry; (entry = next_entry(top)); seen++)
        if (unlinkat(dirfd(top), entry->d_name, 0) && errno != ENOENT && remove_below(dirfd(top), entry->d_name, number))
            return -1;
    return seen;
}

int remove_folder(const char *path) {
    DIR *top = open_folder(AT_FDCWD, path);
    if (!top)
        return errno == ENOENT ? 0 : -1;
    unsigned number = 0;
    int seen;
    while ((seen = remove_entries(top, &number)) > 0)
        ;
    closedir(top);
    return seen < 0 ? -1 : rmdir(path);
}
