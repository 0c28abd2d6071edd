#define _GNU_SOURCE
#include "session_members.h"
#include "protocol.h"
#include "watchdog.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define KILL_PASSES 4 /* a pass may miss a process that is being forked */

static struct member members[MAX_MEMBERS];
static int known; /* highest used entry + 1 */

struct member *member_by_pid(pid_t pid) {
    for (int i = 0; i < known; i++)
        if (members[i].pid == pid)
            return &members[i];
    return NULL;
}

struct member *member_by_number(int64_t number) {
    for (int i = 0; i < known; i++)
        if (members[i].pid && members[i].number == number)
            return &members[i];
    return NULL;
}

struct member *member_add(int slot, int64_t number, pid_t pid) {
    for (int i = 0; i < MAX_MEMBERS; i++)
        if (!members[i].pid) {
            members[i] = (struct member){.pid = pid, .slot = slot, .number = number, .leaf_processes = -1, .leaf_kill = -1,
                                         .leaf_usage = -1, .leaf_threads = -1};
            known = i >= known ? i + 1 : known;
            return &members[i];
        }
    errno = ENFILE;
    return NULL;
}

int member_pids(int slot, pid_t *pids, int most) {
    int count = 0;
    for (int i = 0; i < known && count < most; i++)
        if (members[i].pid && members[i].slot == slot)
            pids[count++] = members[i].pid;
    return count;
}

int members_of(int slot) {
    int count = 0;
    for (int i = 0; i < known; i++)
        count += members[i].pid && members[i].slot == slot;
    return count;
}

/* The kernel lists ids of this process's own PID namespace. */
int for_each_listed(int list_fd, void (*act)(pid_t id, void *about), void *about) {
    char text[8192], again[32];
    int count = 0;
    snprintf(again, sizeof again, "/proc/self/fd/%d", list_fd);
    int fd = open(again, O_RDONLY | O_CLOEXEC); /* opened each time: version 1 caches the list of an open file for a second */
    if (fd < 0)
        return 0;
    for (ssize_t n; (n = read(fd, text, sizeof text - 1)) > 0;) {
        text[n] = 0;
        for (char *at = text, *next;; at = next, count++) {
            long pid = strtol(at, &next, 10);
            if (next == at)
                break;
            if (pid > 1) /* 0: a process of another namespace */
                act((pid_t)pid, about);
        }
    }
    close(fd);
    return count;
}

static void clear_if_equal(pid_t pid, void *wanted) {
    if (pid == *(pid_t *)wanted)
        *(pid_t *)wanted = 0;
}

static void kill_listed(pid_t pid, void *none) {
    (void)none;
    kill(pid, SIGKILL);
}

static int is_listed(int list_fd, pid_t pid) {
    pid_t wanted = pid;
    for_each_listed(list_fd, clear_if_equal, &wanted);
    return !wanted;
}

static int move(pid_t pid, int processes_fd) {
    char text[16];
    int n = snprintf(text, sizeof text, "%d", (int)pid);
    return write(processes_fd, text, (size_t)n) == n ? 0 : -1;
}

/* A process outside the group that counts CPU time would never use up its time, so membership is verified. */
int member_enter_leaf(struct member *m, pid_t program, const int *leaf, int flags) {
    m->leaf_processes = leaf[0], m->leaf_kill = leaf[1], m->leaf_usage = leaf[2], m->leaf_threads = leaf[3];
    m->by_pids = flags & LEAF_BY_PIDS;
    if (!(flags & LEAF_JOINED) && move(program, m->leaf_processes))
        return -1;
    errno = ESRCH;
    return is_listed(m->leaf_processes, program) && is_listed(m->leaf_threads, program) ? 0 : -1;
}

static void kill_leaf(struct member *m) {
    if (!m->by_pids) {
        (void)!pwrite(m->leaf_kill, "1", 1, 0);
        return;
    }
    (void)!pwrite(m->leaf_kill, "0", 1, 0); /* no process in the group can fork any more */
    for (int pass = 0; pass < KILL_PASSES && for_each_listed(m->leaf_processes, kill_listed, NULL); pass++)
        ;
}

void member_kill(struct member *m) {
    if (m->leaf_kill >= 0)
        kill_leaf(m);
    else
        for (int pass = 0; pass < KILL_PASSES && kill_descendants(m->pid); pass++)
            ; /* before the member itself, which adopts their orphans */
    kill(m->pid, SIGKILL);
}

void member_forget(struct member *m) {
    if (m->leaf_kill >= 0) {
        kill_leaf(m);
        close(m->leaf_kill);
        close(m->leaf_processes);
        close(m->leaf_usage);
        close(m->leaf_threads);
    }
    m->pid = 0;
    while (known && !members[known - 1].pid)
        known--;
}

pid_t hello_sender(int fd, int64_t *uid) {
    char byte;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(struct ucred))]; /* no room for descriptors, so the kernel drops them */
    } control = {0};
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) <= 0)
        return -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (!c || c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_CREDENTIALS)
        return -1;
    struct ucred *who = (struct ucred *)CMSG_DATA(c);
    siginfo_t info = {0};
    /* A child keeps its pid until it is reaped, so this is still the sender. */
    if (who->pid <= 1 || waitid(P_PID, (id_t)who->pid, &info, WEXITED | WNOHANG | WNOWAIT | __WALL))
        return -1;
    *uid = who->uid;
    return who->pid;
}
