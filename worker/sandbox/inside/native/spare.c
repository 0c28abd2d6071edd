/* The spare: a child that the zygote forks while no program runs, so that the next program starts at once (latency only: the CPU
 * time of a call stays the same, a part of it is spent before the call).
 *
 * It has namespaces, a stub, a folder and a /proc of its own, and waits. No program has used any of that before, and none but
 * one will. What depends on the call comes through a socket: slot, limits, control groups and descriptors. The remaining steps
 * follow in their usual order (steps.c), all of them before the first byte of the payload is read. Until then the spare is in no
 * slot's control group, and no slot's uid has a process of it. Only where every layer works; a program that does not fit, or
 * that finds no spare, starts as usual. */
#include "zygote.h"

#define SPARE_AFTER_NS 2000000LL
#define MAX_SPARE_AGE_NS (config.faults ? 1000000000LL : 60000000000LL) /* short in tests */
#define MAX_HANDED_OVER (RUN_FDS + MAX_CG_ATTACH)

struct handover {
    struct request request;
    int64_t uid;
};

union handover_fds {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int) * MAX_HANDED_OVER)];
};

int64_t spare_due_ns(void) {
    if (loop->spare.state == SPARE_WAITING)
        return loop->spare.made_ns + MAX_SPARE_AGE_NS;
    int can_be = config.layers == ALL_LAYERS && loop->wants_spare && !loop->has_last_uid;
    return loop->spare.state == SPARE_NONE && can_be ? loop->idle_since_ns + SPARE_AFTER_NS : INT64_MAX;
}

/* Closes what the spare inherited, except for two descriptors. The low numbers stay in use, see FIRST_FREE_FD. */
static int keep_two(int one, int other) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0 || dup2(null, 1) < 0 || (loop->control_fd < FIRST_FREE_FD && dup2(null, loop->control_fd) < 0))
        return -1;
    unsigned low = (unsigned)(one < other ? one : other), high = (unsigned)(one < other ? other : one);
    return (low > FIRST_FREE_FD && syscall(SYS_close_range, FIRST_FREE_FD, low - 1, 0)) ||
           (high > low + 1 && syscall(SYS_close_range, low + 1, high - 1, 0)) || syscall(SYS_close_range, high + 1, ~0U, 0);
}

/* Waits for a program. Returns its slot, or exits when there will be none. */
static struct slot *wait_for_program(int socket_fd) {
    struct handover handover;
    union handover_fds control;
    struct iovec data = {&handover, sizeof handover};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;
    while ((n = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
        ;
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (n != sizeof handover || !c || c->cmsg_type != SCM_RIGHTS || message.msg_flags & MSG_CTRUNC)
        _exit(EXIT_NOT_CONFINED);
    struct slot *s = &loop->slots[handover.request.slot];
    s->request = handover.request;
    s->uid = handover.uid;
    int fds[MAX_HANDED_OVER];
    memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
    int next = 0;
    for (int i = 0; i < RUN_FDS; i++)
        s->fd[i] = i < FD_STDIN || s->request.flags >> (i - FD_STDIN) & 1 ? fds[next++] : -1;
    int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    for (int i = CG_ATTACH; i < SLOT_FDS; i++)
        s->cgroup[i] = next < count ? fds[next++] : -1;
    return s;
}

/* In the spare. */
static void *live_as_spare(int socket_fd, int network) {
    struct slot own = {.network = network, .request = {.folder_bytes = loop->folder_bytes, .fail_step = loop->spare_fails_at}};
    prepare_python();
    if (confine_spare(&own) || keep_two(socket_fd, config.landlock_fd) || rehearse())
        _exit(EXIT_NOT_CONFINED);
    return become_program(wait_for_program(socket_fd));
}

static void forget_spare(struct spare *spare) {
    kill(spare->stub, SIGKILL);
    close(spare->socket);
    close(spare->network);
    spare->state = SPARE_DYING;
}

static void *make_spare(int64_t now) {
    struct spare *spare = &loop->spare;
    int ends[2];
    loop->wants_spare = 0; /* unless it succeeds */
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
        return NULL;
    int network = take_network();
    pid_t child = network < 0 ? -1 : fork_with_stub(&spare->stub_stack, config.last_uid, &spare->stub);
    if (child == 0)
        return live_as_spare(ends[1], network);
    close(ends[1]);
    if (child < 0) {
        close(ends[0]);
        if (network >= 0)
            close(network);
        return NULL;
    }
    *spare = (struct spare){.state = SPARE_WAITING, .child = child, .stub = spare->stub, .socket = ends[0], .network = network,
                            .stub_stack = spare->stub_stack, .made_ns = now, .folder_bytes = loop->folder_bytes};
    loop->wants_spare = 1;
    return NULL;
}

void *mind_spare(int64_t now) {
    if (now < spare_due_ns())
        return NULL;
    if (loop->spare.state == SPARE_NONE)
        return make_spare(now);
    forget_spare(&loop->spare);
    return NULL;
}

static int hand_over(struct spare *spare, struct slot *s) {
    struct handover handover = {s->request, s->uid};
    union handover_fds control = {0};
    int fds[MAX_HANDED_OVER], count = 0;
    for (int i = 0; i < RUN_FDS; i++)
        if (s->fd[i] >= 0)
            fds[count++] = s->fd[i];
    for (int i = CG_ATTACH; i < SLOT_FDS; i++)
        if (s->cgroup[i] >= 0)
            fds[count++] = s->cgroup[i];
    struct iovec data = {&handover, sizeof handover};
    size_t size = sizeof(int) * (size_t)count;
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_SPACE(size)};
    control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(size), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), fds, size);
    return sendmsg(spare->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof handover ? 0 : -1;
}

pid_t take_spare(struct slot *s) {
    struct spare *spare = &loop->spare;
    loop->spare_fails_at = s->request.fail_step;
    if (spare->state != SPARE_WAITING || s->is_session || is_step_of_spare(s->request.fail_step))
        return 0;
    if (s->forked_ns - spare->made_ns > MAX_SPARE_AGE_NS || spare->folder_bytes != s->request.folder_bytes) {
        forget_spare(spare);
        return 0;
    }
    s->cpu_before_ns = meter_know_one(&s->known, spare->child);
    if (hand_over(spare, s)) {
        forget_spare(spare);
        s->cpu_before_ns = s->known.count = 0;
        return 0;
    }
    char *stack = s->stub_stack;
    s->stub = spare->stub;
    s->stub_stack = spare->stub_stack;
    s->network = spare->network;
    close(spare->socket);
    spare->stub_stack = stack;
    spare->state = SPARE_NONE;
    return spare->child;
}

int reap_spare(pid_t pid) {
    struct spare *spare = &loop->spare;
    if (spare->state == SPARE_NONE || (pid != spare->child && pid != spare->stub))
        return 0;
    if (spare->state == SPARE_WAITING) { /* its set-up failed: the next program starts as usual, and says why */
        loop->wants_spare = 0;
        forget_spare(spare);
    }
    spare->child_reaped |= pid == spare->child;
    spare->stub_reaped |= pid == spare->stub;
    if (spare->child_reaped && spare->stub_reaped)
        spare->state = SPARE_NONE;
    return 1;
}
