/* Signals where programs share their uid with others and neither a PID namespace nor Landlock (before Linux 6.12) keeps them
 * apart. A filter of such a program hands each call that signals a process to its supervisor (seccomp.py), and the caller waits. A call that can only reach the caller itself goes on. The supervisor sends every other signal itself, through
 * a pidfd and only to its own descendants: if the call went on, its target's pid could meanwhile be another process's. */
#include "zygote.h"
#include <linux/seccomp.h>
#include <sys/ioctl.h>

#define MOST_PROCESSES 4096

#ifndef SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
#define SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (1UL << 5) /* Linux 6.0 */
#endif

int ask_for_signals(void) {
    struct sock_fprog *filter = &config.signal_filter;
    /* Once the supervisor has seen a call, only SIGKILL interrupts it. Without that a call may end with EINTR. */
    unsigned long flags = SECCOMP_FILTER_FLAG_NEW_LISTENER;
    int listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, filter);
    if (listener < 0 && errno == EINVAL)
        listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, filter);
    if (listener < 0)
        return -1;
    return send_descriptor(supervisor_fd, listener); /* the next steps close both */
}

static pid_t thread_group(pid_t thread) {
    char text[1024];
    const char *at = read_proc_file(thread, "status", text, sizeof text) > 0 ? strstr(text, "\nTgid:") : NULL;
    return at ? (pid_t)strtol(at + 6, NULL, 10) : -1;
}

struct place {
    int parent, group;
};

static struct place place_of(pid_t pid) {
    char text[512];
    struct place place = {-1, -1};
    const char *at = read_proc_file(pid, "stat", text, sizeof text) > 0 ? strrchr(text, ')') : NULL;
    if (at && sscanf(at, ") %*c %d %d", &place.parent, &place.group) != 2)
        place.parent = -1;
    return place;
}

/* The process and its ancestors below this process. Returns how many, 0 if it does not descend from this process. */
static int line_of(pid_t pid, pid_t *line) {
    pid_t self = getpid();
    for (int count = 0; pid > 1 && pid != self && count < MOST_PROCESSES;) {
        line[count++] = pid;
        if ((pid = place_of(pid).parent) == self)
            return count;
    }
    return 0;
}

/* Reads the line twice. While it is read a foreign parent could end and a descendant get its pid; then the orphan has another
 * parent at the second reading. */
static int descends_from_me(pid_t pid) {
    static pid_t first[MOST_PROCESSES], again[MOST_PROCESSES];
    int count = line_of(pid, first);
    return count && line_of(pid, again) == count && !memcmp(first, again, (size_t)count * sizeof *first);
}

static int is_meant(pid_t pid, pid_t target, pid_t caller) {
    if (target > 0)
        return 1;
    return target == -1 ? pid != caller : place_of(pid).group == -(int64_t)target;
}

/* Sends a signal (0: none) to those of this process's descendants that `target` means in kill(2). Returns how many they are.
 * The pidfd is opened before the checks: if it still works afterwards, they were about its process. */
static int signal_descendants(pid_t target, pid_t caller, int number) {
    static pid_t pids[MOST_PROCESSES];
    int count = 1, reached = 0;
    pids[0] = target;
    if (target < 0)
        count = list_descendants(getpid(), pids, MOST_PROCESSES);
    for (int i = 0; i < count; i++) {
        int process = (int)syscall(SYS_pidfd_open, pids[i], 0);
        if (process >= 0 && descends_from_me(pids[i]) && is_meant(pids[i], target, caller))
            reached += !syscall(SYS_pidfd_send_signal, process, number, NULL, 0);
        if (process >= 0)
            close(process);
    }
    return reached;
}

static int reaches_only_itself(const struct seccomp_notif *asked, pid_t caller) {
    pid_t target = (pid_t)asked->data.args[0];
    if (asked->data.nr == SYS_tkill)
        return target == (pid_t)asked->pid;
    return target == caller || (asked->data.nr == SYS_kill && target == 0); /* its group is in a session of the program's */
}

void answer_signal(int listener) {
    struct seccomp_notif asked = {0};
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked))
        return; /* the caller was interrupted and will ask again */
    struct seccomp_notif_resp answer = {.id = asked.id, .error = -EPERM};
    pid_t target = (pid_t)asked.data.args[0], caller = thread_group((pid_t)asked.pid);
    int number = (int)asked.data.args[1], sends = 0;
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_ID_VALID, &asked.id))
        return; /* it ended: its pid may have been another process's */
    if (caller > 0 && reaches_only_itself(&asked, caller)) {
        answer.error = 0;
        answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE; /* the numbers were copied to registers, and it cannot be reaped now */
    } else if (number < 0 || number >= NSIG) {
        answer.error = -EINVAL;
    } else if (caller > 0 && asked.data.nr == SYS_kill) {
        sends = signal_descendants(target, caller, 0);
        answer.error = sends ? 0 : kill(target, 0) && errno == ESRCH ? -ESRCH : -EPERM;
    }
    /* The answer comes first: the signal's own consequences, such as SIGCHLD, could interrupt the caller. */
    if (!ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer) && sends && number)
        signal_descendants(target, caller, number);
}
