/* The init stub: PID 1 of a program's PID namespace. Killing it kills all processes of the program.
 *
 * Lingering stubs: the last process to leave a mount namespace blocks in synchronize_rcu_expedited(), 2 to 7 ms on a busy
 * machine. The stub is in the program's mount namespace and leaves it last, so the stub blocks. The zygote does not wait for
 * a stub if the kernel counts no other process of the program, and if the program's files use little memory (it would count
 * for the next program of the slot). Such a stub lingers. Stubs are killed in batches, because concurrent calls share one
 * grace period (3 % less CPU time for a short program than one by one). */
#include "zygote.h"
#include <sys/statfs.h>

#define LINGERING_BATCH 8
#define MAX_LEFT_BYTES (256 << 10)
#define MAX_LEFT_FILES 256

/* Shares memory with the zygote (CLONE_VM), so it uses no libc and no heap. SIGCHLD is ignored: the kernel reaps the
 * processes that are re-parented to it. Every other signal is blocked; only SIGKILL from outside ends it. */
int stub_main(void *argument) {
    long uid = (long)(intptr_t)argument;
    struct { void (*handler)(int); unsigned long flags; void (*restorer)(void); unsigned long mask; } ignore = {SIG_IGN, 0, NULL, 0};
    unsigned long every_signal = ~0UL;
    raw4(SYS_rt_sigprocmask, SIG_SETMASK, (long)&every_signal, 0, 8);
    raw4(SYS_rt_sigaction, SIGCHLD, (long)&ignore, 0, 8);
    raw4(SYS_close_range, 0, ~0U, 0, 0);
    /* Its memory is the zygote's. Without Landlock a program of the same uid could reach it where fs.suid_dumpable is 1. */
    if (config.layers & LAYER_UID && config.layers & LAYER_LANDLOCK) {
        raw4(SYS_setresgid, uid, uid, uid, 0);
        raw4(SYS_setresuid, uid, uid, uid, 0);
    }
    raw4(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0);
    for (;;)
        raw4(SYS_ppoll, 0, 0, 0, 0);
    return 0;
}

/* Forks do not copy it: only a stub uses it, and that shares the zygote's memory. */
char *new_stack(void) {
    char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED)
        return NULL;
    madvise(stack, STACK_BYTES, MADV_DONTFORK);
    return stack;
}

struct lingering_stub *lingering_stub_by_pid(pid_t pid) {
    for (int i = 0; i < MAX_LINGERING_STUBS; i++)
        if (loop->lingering_stubs[i].stub == pid)
            return &loop->lingering_stubs[i];
    return NULL;
}

void kill_lingering_stubs(void) {
    for (int i = 0; loop->lingering_alive && i < MAX_LINGERING_STUBS; i++) {
        struct lingering_stub *one = &loop->lingering_stubs[i];
        if (!one->stub || one->is_killed)
            continue;
        kill(one->stub, SIGKILL);
        one->is_killed = 1;
        loop->lingering_alive--;
    }
}

static int has_no_process(struct slot *s) {
    char now[4];
    return s->cgroup[CG_PIDS_NOW] >= 0 && pread(s->cgroup[CG_PIDS_NOW], now, sizeof now, 0) == 2 && now[0] == '0';
}

/* The workspace as the stub sees it. */
static int has_few_files(struct slot *s) {
    char path[64];
    struct statfs files;
    snprintf(path, sizeof path, "/proc/%d/root" WORKSPACE, (int)s->stub);
    return !statfs(path, &files) && (int64_t)(files.f_blocks - files.f_bfree) * files.f_bsize <= MAX_LEFT_BYTES &&
           files.f_files - files.f_ffree <= MAX_LEFT_FILES;
}

/* Returns 0 if the zygote has to wait for the stub. */
int let_stub_linger(struct slot *s) {
    struct lingering_stub *entry = lingering_stub_by_pid(0);
    if (!entry || s->is_session || !(config.layers & LAYER_MOUNTS) || !has_no_process(s) || !has_few_files(s))
        return 0;
    char *spare = entry->stack;
    *entry = (struct lingering_stub){s->stub, 0, s->stub_stack};
    s->stub_stack = spare;
    if (++loop->lingering_alive >= LINGERING_BATCH)
        kill_lingering_stubs();
    return 1;
}

int reap_lingering_stub(pid_t pid) {
    struct lingering_stub *one = lingering_stub_by_pid(pid);
    if (!one)
        return 0;
    one->stub = 0;
    loop->lingering_alive -= !one->is_killed;
    return 1;
}
