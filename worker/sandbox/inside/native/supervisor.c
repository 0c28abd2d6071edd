#include "zygote.h"
#include <poll.h>
#include <sys/signalfd.h>

#define PASS_NS 1000000L
#define MAX_PASSES 1000
enum { LIMIT_FD, PROGRAM_FD, SIGNAL_FD }; /* of the supervisor */
#define QUIET_PASSES 2 /* the kernel's list may miss a child while it changes */

int supervisor_fd = -1;

static int receive_descriptor(int socket_fd) {
    char byte;
    int fd = -1;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(socket_fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&message) &&
        control.header.cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(&control.header), sizeof fd);
    return fd;
}

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

/* Reaps what ended. When the program has, kills its processes and ends. */
static void reap_program(pid_t program, struct progress *progress, int pids_limit_fd) {
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

/* Receives the descriptor at which the program's filter asks, then answers what it asks. Returns the descriptor to watch, or
 * -1 if there is none: the program ended, or its filter does not ask. */
static int serve_program(int fd, int events) {
    static int listener = -1;
    if (fd == listener && events & POLLIN) {
        answer_signal(listener);
        return listener;
    }
    if (fd == PROGRAM_FD)
        listener = receive_descriptor(fd);
    close(fd);
    return fd == PROGRAM_FD ? listener : -1;
}

pid_t supervise(struct progress *progress, int pids_limit_fd) {
    sigset_t waited;
    sigemptyset(&waited);
    sigaddset(&waited, SIGCHLD);
    sigaddset(&waited, SIGTERM);
    sigprocmask(SIG_BLOCK, &waited, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int link[2], signals = signalfd(-1, &waited, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, link))
        _exit(1);
    supervisor_fd = link[1];
    pid_t program = fork();
    if (program == 0)
        return 0;
    if (program < 0)
        _exit(1);
    dup2(link[0], PROGRAM_FD);
    dup2(signals, SIGNAL_FD);
    pids_limit_fd = pids_limit_fd < 0 ? -1 : dup2(pids_limit_fd, LIMIT_FD);
    syscall(SYS_close_range, SIGNAL_FD + 1, ~0U, 0);
    struct pollfd events[] = {{SIGNAL_FD, POLLIN, 0}, {PROGRAM_FD, POLLIN, 0}};
    for (;;) {
        poll(events, 2, -1);
        if (events[1].revents)
            events[1].fd = serve_program(events[1].fd, events[1].revents);
        struct signalfd_siginfo info;
        while (read(SIGNAL_FD, &info, sizeof info) == sizeof info)
            if (info.ssi_signo == SIGTERM)
                kill(program, SIGKILL);
        reap_program(program, progress, pids_limit_fd);
    }
}
