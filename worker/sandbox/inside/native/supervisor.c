#include "zygote.h"

#define PASS_NS 1000000L
#define MAX_PASSES 1000
#define QUIET_PASSES 2 /* the kernel's list may miss a child while it changes */

static int is_alive(pid_t child) {
    siginfo_t info = {0};
    return !waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT | __WALL) && info.si_pid == 0;
}

/* Sends SIGKILL to each direct child; the next pass kills the orphans that they leave. Returns how many were alive. */
static int kill_children(void) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *children = fopen(path, "re");
    int pid, alive = 0;
    while (children && fscanf(children, "%d", &pid) == 1)
        if (is_alive(pid)) {
            kill(pid, SIGKILL);
            alive++;
        }
    if (children)
        fclose(children);
    return alive;
}

/* Reaps nothing before all are dead: zombies count towards the process limit, so a fork bomb that forks as fast as it is
 * killed runs out of processes. */
static void kill_all(void) {
    for (int pass = 0, quiet = 0; quiet < QUIET_PASSES && pass < MAX_PASSES; pass++) {
        int alive = kill_children();
        quiet = alive ? 0 : quiet + 1;
        if (alive)
            nanosleep(&(struct timespec){0, PASS_NS}, NULL);
    }
}

/* Returns when no process is left: a slot with a live process must not be used again. */
static void kill_and_reap_all(int pids_limit_fd) {
    if (pids_limit_fd >= 0)
        (void)!pwrite(pids_limit_fd, "0", 1, 0); /* no process can fork any more; without it killing takes longer */
    while (waitpid(-1, NULL, __WALL | WNOHANG) >= 0 || errno != ECHILD) {
        kill_all();
        while (waitpid(-1, NULL, __WALL | WNOHANG) > 0)
            ;
    }
}

pid_t supervise(struct progress *progress, int pids_limit_fd) {
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
    if (pids_limit_fd > 0) /* everything else is closed */
        syscall(SYS_close_range, 0, pids_limit_fd - 1, 0);
    syscall(SYS_close_range, pids_limit_fd + 1, ~0U, 0);
    if (program < 0)
        _exit(1);
    for (;;) {
        if (sigwaitinfo(&waited, NULL) == SIGTERM)
            kill(program, SIGKILL);
        int status;
        struct rusage usage;
        for (pid_t pid; (pid = wait4(-1, &status, __WALL | WNOHANG, &usage)) > 0;)
            if (pid == program) {
                progress->status = status;
                progress->cpu_ns = cpu_ns_of(&usage);
                progress->ended_ns = now_ns();
                kill_and_reap_all(pids_limit_fd);
                _exit(0);
            }
    }
}
