#include "zygote.h"
#include <linux/futex.h>

static int *thread_id; /* where libc stores the thread id; a fork has to update it */
static struct robust_list_head *robust_list;

void find_thread_addresses(void) {
    size_t size;
    if (prctl(PR_GET_TID_ADDRESS, &thread_id))
        thread_id = NULL; /* the kernel lacks CONFIG_CHECKPOINT_RESTORE: sessions cannot fork */
    if (syscall(SYS_get_robust_list, 0, &robust_list, &size))
        robust_list = NULL;
}

static pid_t fork_with(unsigned long flags) {
    flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD;
#if defined(__x86_64__)
    long pid = syscall(SYS_clone, flags, 0, NULL, thread_id, 0);
#else
    long pid = syscall(SYS_clone, flags, 0, NULL, 0, thread_id);
#endif
    if (pid == 0 && robust_list)
        syscall(SYS_set_robust_list, robust_list, sizeof *robust_list);
    return (pid_t)pid;
}

pid_t fork_without_libc(void) { return thread_id ? fork_with(0) : fork(); }

pid_t fork_sibling(void) {
    if (!thread_id) {
        errno = ENOSYS;
        return -1;
    }
    pid_t pid = fork_with(CLONE_PARENT);
    if (pid == 0) /* neither is inherited */
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) || prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
            _exit(1);
    return pid;
}
