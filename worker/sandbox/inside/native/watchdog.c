/* Measures a process tree through /proc, a few times a second. First by resident pages, which is cheap but counts shared
 * pages many times; if that is too much, by the kernel's proportional count. */
#include "zygote.h"
#include <dirent.h>

#define MAX_PROCESSES 4096

ssize_t read_proc_file(pid_t pid, const char *name, char *text, size_t size) {
    char path[400];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, size - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    return n;
}

static int add_children_of_thread(pid_t pid, const char *thread, pid_t *pids, int count, int most) {
    char name[300], text[16384];
    snprintf(name, sizeof name, "task/%s/children", thread);
    if (read_proc_file(pid, name, text, sizeof text) <= 0)
        return count;
    for (char *at = text, *next; count < most; at = next) {
        long child = strtol(at, &next, 10);
        if (next == at)
            break;
        pids[count++] = (pid_t)child;
    }
    return count;
}

/* Appends the children of every thread of a process. The next call sees a fork that is in progress. */
static int add_children(pid_t pid, pid_t *pids, int count, int most) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *threads = opendir(path);
    if (!threads)
        return count;
    for (struct dirent *thread; (thread = readdir(threads));)
        if (thread->d_name[0] != '.')
            count = add_children_of_thread(pid, thread->d_name, pids, count, most);
    closedir(threads);
    return count;
}

static int64_t resident_bytes(pid_t pid) {
    char text[128];
    long resident = 0;
    if (read_proc_file(pid, "statm", text, sizeof text) > 0)
        sscanf(text, "%*d %ld", &resident);
    return resident * sysconf(_SC_PAGESIZE);
}

/* Anonymous and shared memory, each page divided by the number of its users: memory that a tree shares, also with the
 * zygote, counts at most once. */
static int64_t proportional_bytes(pid_t pid) {
    char text[2048];
    if (read_proc_file(pid, "smaps_rollup", text, sizeof text) <= 0)
        return resident_bytes(pid);
    int64_t total = 0;
    for (const char *const *name = (const char *const[]){"\nPss_Anon:", "\nPss_Shmem:", NULL}; *name; name++) {
        const char *at = strstr(text, *name);
        if (at)
            total += strtoll(at + strlen(*name), NULL, 10) * 1024;
    }
    return total;
}

static int64_t own_memory;

void remember_own_memory(void) { own_memory = proportional_bytes(getpid()); }

pid_t first_child(pid_t pid) {
    pid_t child = 0;
    return add_children(pid, &child, 0, 1) ? child : 0;
}

int count_children(pid_t pid) {
    pid_t children[16];
    return add_children(pid, children, 0, 16);
}

int list_descendants(pid_t pid, pid_t *pids, int most) {
    int count = add_children(pid, pids, 0, most);
    for (int i = 0; i < count; i++)
        count = add_children(pids[i], pids, count, most);
    return count;
}

int kill_descendants(pid_t pid) {
    pid_t pids[256];
    int count = list_descendants(pid, pids, 256);
    for (int i = 0; i < count; i++)
        kill(pids[i], SIGKILL);
    return count;
}

int uses_more_memory(const pid_t *roots, int root_count, pid_t other, int64_t most, int64_t *processes) {
    static pid_t pids[MAX_PROCESSES];
    int count = 0;
    while (count < root_count && count < MAX_PROCESSES)
        pids[count] = roots[count], count++;
    if (other)
        count = add_children(other, pids, count, MAX_PROCESSES);
    for (int i = 0; i < count; i++)
        count = add_children(pids[i], pids, count, MAX_PROCESSES);
    *processes = count;
    int64_t resident = 0, own = -own_memory;
    for (int i = 0; i < count; i++)
        resident += resident_bytes(pids[i]);
    if (resident <= most)
        return 0;
    for (int i = 0; i < count && own <= most; i++)
        own += proportional_bytes(pids[i]);
    return own > most;
}
