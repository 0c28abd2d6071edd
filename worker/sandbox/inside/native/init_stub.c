/* The init stub: PID 1 of a program's PID namespace. Killing it kills all processes of the program. Also the stubs that outlive
 * the end of their program. */
#define _GNU_SOURCE
#include "raw.h"
#include "zygote.h"
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LEAVERS_TOGETHER 8
#define LEFT_MOST_BYTES (256 << 10)
#define LEFT_MOST_FILES 256

/* Shares memory with the zygote (CLONE_VM), so: no libc, nothing on the heap. SIGCHLD is ignored, which makes the kernel
 * reap what is re-parented to it; every other signal is blocked and only SIGKILL from outside ends it. */
int stub_main(void *argument) {
    long uid = (long)(intptr_t)argument;
    struct { void (*handler)(int); unsigned long flags; void (*restorer)(void); unsigned long mask; } ignore = {SIG_IGN, 0, NULL, 0};
    unsigned long every_signal = ~0UL;
    raw4(SYS_rt_sigprocmask, SIG_SETMASK, (long)&every_signal, 0, 8);
    raw4(SYS_rt_sigaction, SIGCHLD, (long)&ignore, 0, 8);
    raw4(SYS_close_range, 0, ~0U, 0, 0);
    if (house.layers & LAYER_UID) {
        raw4(SYS_setresgid, uid, uid, uid, 0);
        raw4(SYS_setresuid, uid, uid, uid, 0);
    }
    raw4(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0);
    for (;;)
        raw4(SYS_ppoll, 0, 0, 0, 0);
    return 0;
}

/* No fork needs it: a stub shares the zygote's memory. */
char *new_stack(void) {
    char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED)
        return NULL;
    madvise(stack, STACK_BYTES, MADV_DONTFORK);
    return stack;
}

/* ---- stubs that outlive their program's end ----
 *
 * Whoever leaves a mount namespace last waits until every core has passed a point of rest (synchronize_rcu_expedited), 2 to 7 ms
 * on a busy machine. The stub is in the program's, so that it is the stub who waits. Nobody waits for the stub where the kernel's
 * count says that no process of the program is left and its files take no memory to speak of, which would count as the next
 * program's: then the program is over, and the stub leaves later. Some leave together, since those who wait at the same time wait
 * for the same point (3 % less CPU time for a short program than one by one). */

struct leaver *leaver_by_pid(pid_t pid) {
    for (int i = 0; i < LEAVERS_MOST; i++)
        if (book->leavers[i].stub == pid)
            return &book->leavers[i];
    return NULL;
}

void dismiss_leavers(void) {
    for (int i = 0; book->leavers_idle && i < LEAVERS_MOST; i++) {
        struct leaver *one = &book->leavers[i];
        if (!one->stub || one->is_killed)
            continue;
        kill(one->stub, SIGKILL);
        one->is_killed = 1;
        book->leavers_idle--;
    }
}

static int has_no_process(struct slot *s) {
    char now[4];
    return s->cgroup[CG_PIDS_NOW] >= 0 && pread(s->cgroup[CG_PIDS_NOW], now, sizeof now, 0) == 2 && now[0] == '0';
}

/* As the stub sees them. */
static int has_few_files(struct slot *s) {
    char path[64];
    struct statfs files;
    snprintf(path, sizeof path, "/proc/%d/root" WORKSPACE, (int)s->stub);
    return !statfs(path, &files) && (int64_t)(files.f_blocks - files.f_bfree) * files.f_bsize <= LEFT_MOST_BYTES &&
           files.f_files - files.f_ffree <= LEFT_MOST_FILES;
}

/* 0 if its stub has to be waited for. */
int let_leave(struct slot *s) {
    struct leaver *place = leaver_by_pid(0);
    if (!place || s->is_session || !(house.layers & LAYER_MOUNTS) || !has_no_process(s) || !has_few_files(s))
        return 0;
    char *spare = place->stack;
    *place = (struct leaver){s->stub, 0, s->stub_stack};
    s->stub_stack = spare;
    if (++book->leavers_idle >= LEAVERS_TOGETHER)
        dismiss_leavers();
    return 1;
}

int has_left(pid_t pid) {
    struct leaver *one = leaver_by_pid(pid);
    if (!one)
        return 0;
    one->stub = 0;
    book->leavers_idle -= !one->is_killed;
    return 1;
}
