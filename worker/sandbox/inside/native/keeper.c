#define _GNU_SOURCE
#include "keeper.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* SIGKILL to each direct child; theirs become ours when they die, and are next. */
static void kill_children(void) {
    char path[64], text[8192];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    for (char *at = text, *next; *at; at = next) {
        long pid = strtol(at, &next, 10);
        if (next == at)
            break;
        if (pid > 1)
            kill((pid_t)pid, SIGKILL);
    }
}

static void sweep(void) {
    do
        kill_children();
    while (waitpid(-1, NULL, __WALL) > 0 || errno != ECHILD);
}

static void report(struct progress *p, int status, struct rusage *u) {
    p->status = status;
    p->cpu_ns = (u->ru_utime.tv_sec + u->ru_stime.tv_sec) * 1000000000LL + (u->ru_utime.tv_usec + u->ru_stime.tv_usec) * 1000LL;
    p->ended_ns = now_ns();
}

pid_t keep(struct progress *progress) {
    sigset_t waited;
    sigemptyset(&waited);
    sigaddset(&waited, SIGCHLD);
    sigaddset(&waited, SIGTERM);
    sigprocmask(SIG_BLOCK, &waited, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        _exit(1);
    pid_t program = fork();
    if (program == 0)
        return 0;
    syscall(SYS_close_range, 0, ~0U, 0);
    if (program < 0)
        _exit(1);
    for (;;) {
        if (sigwaitinfo(&waited, NULL) == SIGTERM) {
            progress->waited_ns = waited_for_cpu_ns(program);
            kill(program, SIGKILL);
        }
        int status;
        struct rusage usage;
        for (pid_t pid; (pid = wait4(-1, &status, __WALL | WNOHANG, &usage)) > 0;)
            if (pid == program) {
                report(progress, status, &usage);
                sweep();
                _exit(0);
            }
    }
}
