/* The table of session members, and the requests about them: add, interrupt, end, measure. */
#include "zygote.h"

#define KILL_PASSES 4 /* a pass may miss a process that is being forked */
#define MAX_LISTED 4096

static struct member members[MAX_MEMBERS];
static int known; /* highest used entry + 1 */

struct member *member_by_pid(pid_t pid) {
    for (int i = 0; i < known; i++)
        if (members[i].pid == pid)
            return &members[i];
    return NULL;
}

static struct member *member_by_number(int64_t number) {
    for (int i = 0; i < known; i++)
        if (members[i].pid && members[i].number == number)
            return &members[i];
    return NULL;
}

struct member *member_add(int slot, int64_t number, pid_t pid) {
    for (int i = 0; i < MAX_MEMBERS; i++)
        if (!members[i].pid) {
            members[i] = (struct member){.pid = pid, .slot = slot, .number = number, .leaf = {-1, -1, -1, -1}};
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

int list_ids(int list_fd, pid_t *ids, int most) {
    char text[8192], again[32];
    int count = 0;
    snprintf(again, sizeof again, "/proc/self/fd/%d", list_fd);
    int fd = open(again, O_RDONLY | O_CLOEXEC); /* opened each time: version 1 caches the list of an open file for a second */
    for (ssize_t n; fd >= 0 && count < most && (n = read(fd, text, sizeof text - 1)) > 0;) {
        text[n] = 0;
        for (char *at = text, *next; count < most; at = next) {
            long id = strtol(at, &next, 10);
            if (next == at)
                break;
            if (id > 1) /* 0: a process of another namespace */
                ids[count++] = (pid_t)id;
        }
    }
    if (fd >= 0)
        close(fd);
    return count;
}

static int is_listed(int list_fd, pid_t pid) {
    pid_t ids[MAX_LISTED];
    int count = list_ids(list_fd, ids, MAX_LISTED);
    while (count && ids[count - 1] != pid)
        count--;
    return count;
}

/* Moves `program` (the member, or the child of its supervisor) into a control group of its own, or checks that it is there:
 * a process outside the group that counts CPU time would never use up its time. The member owns the descriptors then. */
static int enter_leaf(struct member *m, pid_t program, const int *leaf, int flags) {
    memcpy(m->leaf, leaf, sizeof m->leaf);
    m->by_pids = flags & LEAF_BY_PIDS;
    if (!(flags & LEAF_JOINED) && write_number(leaf[LEAF_PROCESSES], program))
        return -1;
    errno = ESRCH;
    return is_listed(leaf[LEAF_PROCESSES], program) && is_listed(leaf[LEAF_THREADS], program) ? 0 : -1;
}

static void kill_leaf(struct member *m) {
    (void)!pwrite(m->leaf[LEAF_KILL], m->by_pids ? "0" : "1", 1, 0); /* 0: no process in the group can fork any more */
    pid_t ids[MAX_LISTED];
    int list = m->leaf[LEAF_PROCESSES];
    for (int pass = 0, count; m->by_pids && pass < KILL_PASSES && (count = list_ids(list, ids, MAX_LISTED)); pass++)
        while (count)
            kill(ids[--count], SIGKILL);
}

/* Kills it and the processes that it started, and nothing else. */
static void kill_member(struct member *m) {
    if (m->leaf[LEAF_KILL] >= 0)
        kill_leaf(m);
    else
        for (int pass = 0; pass < KILL_PASSES && kill_descendants(m->pid); pass++)
            ; /* before the member itself, which adopts their orphans */
    kill(m->pid, SIGKILL);
}

void member_forget(struct member *m) {
    if (m->leaf[LEAF_KILL] >= 0)
        kill_leaf(m);
    close_all(m->leaf, LEAF_FDS);
    m->pid = 0;
    while (known && !members[known - 1].pid)
        known--;
}

/* The sender of the message in this socket, from the kernel's credentials; -1 if there is none. */
static pid_t hello_sender(int fd, int64_t *uid) {
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

/* ---- requests ---- */

/* Registers the fork that sent hello. It has to be a child of this zygote that has no other role. */
static struct member *register_fork(struct request *request, int hello_fd) {
    int64_t uid = -1;
    pid_t pid = hello_sender(hello_fd, &uid);
    int is_foreign_uid = config.layers & LAYER_UID && uid != loop->slots[request->slot].uid;
    int is_taken = pid < 0 || member_by_pid(pid) || lingering_stub_by_pid(pid);
    for (int i = 0; i < loop->slots_known; i++)
        is_taken |= loop->slots[i].state > SLOT_FREE && (loop->slots[i].child == pid || loop->slots[i].stub == pid);
    errno = ESRCH;
    return is_taken || is_foreign_uid ? NULL : member_add((int)request->slot, request->member, pid);
}

/* Without a PID namespace a session's process is the child of its supervisor. */
static pid_t program_of(struct member *m) { return loop->slots[m->slot].stub ? m->pid : first_child(m->pid); }

static void add_member(struct request *request, int *fd) {
    struct slot *s = &loop->slots[request->slot];
    struct report answer = {.kind = REPORT_MEMBER, .slot = request->slot, .call = request->member};
    int has_hello = request->flags & HAS_HELLO, has_leaf = request->flags & HAS_LEAF, *leaf = &fd[has_hello ? 1 : 0];
    errno = ESRCH;
    struct member *m = NULL;
    if (s->state == SLOT_RUNNING && s->is_session && s->request.call == request->call)
        m = has_hello ? register_fork(request, fd[0]) : member_by_number(request->member);
    if (!m || (has_leaf && enter_leaf(m, program_of(m), leaf, (int)request->flags)))
        answer.error = errno ? errno : EINVAL;
    if (has_hello)
        close(fd[0]);
    if (!m && has_leaf)
        close_all(leaf, LEAF_FDS);
    if (m && answer.error)
        kill_member(m);
    send_report(&answer);
}

/* How long a session's process has starved in its cell. */
static int64_t measure_member_starvation(struct member *m, int64_t now) {
    if (m->leaf[LEAF_USAGE] >= 0)
        return meter_group(&m->meter, m->leaf[LEAF_USAGE], m->leaf[LEAF_THREADS], &m->known, now);
    return meter_one(&m->meter, program_of(m), m->pid, loop->slots[m->slot].stub ? 0 : 1, now);
}

static void begin_cell(struct member *m) {
    if (m->leaf[LEAF_USAGE] < 0)
        return meter_start_one(&m->meter, program_of(m), now_ns());
    meter_start(&m->meter, m->leaf[LEAF_USAGE], now_ns());
    meter_know(&m->known, m->leaf[LEAF_THREADS]);
}

static void report_usage(struct member *m) {
    struct slot *s = &loop->slots[m->slot];
    clockid_t clock;
    struct timespec used = {0};
    if (!clock_getcpuclockid(m->pid, &clock))
        clock_gettime(clock, &used);
    send_report(&(struct report){.kind = REPORT_USAGE, .slot = m->slot, .call = m->number,
                      .cpu_ns = (int64_t)used.tv_sec * 1000000000LL + used.tv_nsec,
                      .starved_ns = measure_member_starvation(m, now_ns()),
                      .memory_peak = read_number(s->cgroup[CG_MEMORY_PEAK]),
                      .processes_peak = read_number(s->cgroup[CG_PIDS_NOW])});
}

void handle_member_request(struct request *request, int *fd) {
    if (request->kind == REQUEST_MEMBER)
        return add_member(request, fd);
    if (request->kind == REQUEST_PROCESSES) {
        struct slot *s = &loop->slots[request->slot];
        if (s->state == SLOT_RUNNING && s->is_session && s->request.call == request->call)
            write_number(s->cgroup[CG_PIDS_LIMIT], request->processes);
        return;
    }
    struct member *m = member_by_number(request->member);
    if (!m || m->slot != request->slot)
        return; /* it ended, and that was reported */
    int is_supervised = !loop->slots[m->slot].stub;
    if (request->kind == REQUEST_INTERRUPT) {
        pid_t pid = program_of(m);
        if (pid > 0)
            kill(pid, SIGINT);
    } else if (request->kind == REQUEST_END_MEMBER && is_supervised)
        end_program(&loop->slots[m->slot], BY_REQUEST);
    else if (request->kind == REQUEST_END_MEMBER)
        kill_member(m);
    else if (request->flags & USAGE_BEGIN)
        begin_cell(m);
    else
        report_usage(m);
}
