/* The zygote's loop: fork a confined child per request, end it by its limits, reap it, report what the kernel measured.
 *
 * Runs in the warm interpreter and does not touch the Python heap, so that pages stay shared with the children. The zygote
 * never reads a byte of the caller's data. */
#include "zygote.h"
#include <poll.h>

#define TICK_NS 50000000LL
#define LOOK_AGAIN_NS 5000000LL /* poll interval for a program that has nearly used up its time */
#define MAX_ROUND_NS 100000000LL
#define MAX_CLEARING_NS 30000000000LL

/* Returns 0 if the caller has to try again: the socket is full, or the kernel lacks memory. A worker that is gone needs no
 * report. */
static int try_send(const struct report *report) {
    return send(loop->control_fd, report, sizeof *report, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 || errno == EPIPE ||
           errno == ECONNRESET || errno == ENOTCONN;
}

/* Never blocks: a blocked zygote enforces no limits. Reports that do not fit into the socket are sent later. Until then the
 * loop reads no request, so only reports of ends can be added, at most one for each slot and member. */
void send_report(const struct report *report) {
    if (!loop->pending && try_send(report))
        return;
    if (loop->pending == MAX_PENDING_REPORTS)
        _exit(1); /* unreachable */
    loop->pending_reports[(loop->first_pending + loop->pending++) % MAX_PENDING_REPORTS] = *report;
}

static void send_pending_reports(void) {
    for (; loop->pending && try_send(&loop->pending_reports[loop->first_pending]); loop->pending--)
        loop->first_pending = (loop->first_pending + 1) % MAX_PENDING_REPORTS;
}

void report_not_started(struct request *request, int error) {
    send_report(&(struct report){.kind = REPORT_ENDED, .slot = request->slot, .call = request->call, .step = -1, .error = error});
}

/* A program's time begins when the supervisor has removed the files of the last program. */
static int64_t began_ns(struct slot *s, int64_t now) {
    if (s->stub || now - s->forked_ns > MAX_CLEARING_NS)
        return s->forked_ns;
    int64_t cleared_ns = config.progress[s - loop->slots].cleared_ns;
    return cleared_ns ? cleared_ns : now;
}

/* The wall limit does not count the time that the program starved; the deadline counts all time. Returns which of them is
 * used up, or 0. Sets `due_ns` to when that happens if the program does not starve any more. */
static int time_is_up(struct slot *s, int64_t now) {
    int64_t began = began_ns(s, now), starved = measure_starvation(s, now);
    int64_t wall_due = began + s->request.wall_ns + starved, deadline = began + s->request.deadline_ns;
    s->due_ns = wall_due < deadline ? wall_due : deadline;
    if (now >= s->due_ns)
        return wall_due <= deadline ? BY_WALL : BY_DEADLINE;
    if (s->due_ns < now + LOOK_AGAIN_NS)
        s->due_ns = now + LOOK_AGAIN_NS;
    return 0;
}

static void watch(struct slot *s, int64_t now) {
    if (s->state != SLOT_RUNNING)
        return;
    if (s->is_session) {
        if (is_watched(s) && exceeds_memory_limit(s))
            end_program(s, BY_MEMORY);
        return;
    }
    int used_up = time_is_up(s, now);
    if (used_up)
        end_program(s, used_up);
    else if (file_size(s->fd[FD_STDOUT]) > s->request.output_bytes || file_size(s->fd[FD_STDERR]) > s->request.output_bytes)
        end_program(s, BY_OUTPUT);
    else if (read_oom_counts(s).kills > s->oom_counts_before.kills)
        end_program(s, BY_MEMORY);
    else if (!(config.layers & LAYER_CGROUP) && exceeds_memory_limit(s))
        end_program(s, BY_MEMORY);
    else
        sample_processes(s);
}

/* Checks every program when a tick is due, and programs past `due_ns` at any time. Without control groups, checking a fork
 * bomb takes long: a round that takes too long stops, and the next one continues there, so that requests are still read.
 * Returns 0 then. */
static int watch_all(int due) {
    int64_t began = now_ns(), now = began;
    for (int seen = 0; loop->running && seen < loop->slots_known; seen++) {
        struct slot *s = &loop->slots[loop->next_watched % loop->slots_known];
        loop->next_watched = (loop->next_watched + 1) % loop->slots_known;
        if (due || s->due_ns <= now)
            watch(s, now);
        if ((now = now_ns()) - began > MAX_ROUND_NS)
            return 0;
    }
    return 1;
}

static int next_timeout_ms(int64_t last_tick, int64_t now) {
    if (!loop->running)
        return -1;
    int64_t next = last_tick + TICK_NS;
    for (int i = 0; i < loop->slots_known; i++)
        if (loop->slots[i].state == SLOT_RUNNING && loop->slots[i].due_ns < next)
            next = loop->slots[i].due_ns;
    return next <= now ? 0 : (int)((next - now + 999999) / 1000000);
}

static int receive(struct request *request, int *fd) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * SLOT_FDS)];
    } control;
    struct iovec data = {request, sizeof *request};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n = raw4(SYS_recvmsg, loop->control_fd, (long)&message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT, 0);
    if (n <= 0)
        return n == -EAGAIN || n == -EINTR ? -1 : 0;
    for (int i = 0; i < SLOT_FDS; i++)
        fd[i] = -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fd, CMSG_DATA(c), sizeof(int) * (count < SLOT_FDS ? count : SLOT_FDS));
        }
    return (size_t)n == sizeof *request ? 1 : -1;
}

/* REQUEST_SLOT: wall_ns is the uid, cpu_s has a bit for each descriptor that is present. */
static void register_slot(struct request *request, int *fd) {
    struct slot *s = &loop->slots[request->slot];
    int named = __builtin_popcountll((unsigned long long)request->cpu_s);
    int is_foreign_uid = request->wall_ns < config.first_uid || request->wall_ns > config.last_uid;
    if ((config.layers & LAYER_UID && is_foreign_uid) || s->state > SLOT_FREE ||
        named > SLOT_FDS || (named && fd[named - 1] < 0)) { /* the kernel drops descriptors beyond the open file limit */
        close_all(fd, SLOT_FDS); /* a worker cannot choose an arbitrary uid, nor change a slot in use */
        return;
    }
    if (s->state == SLOT_FREE) /* a session's slot in which the last start failed */
        close_all(s->cgroup, SLOT_FDS);
    s->uid = request->wall_ns;
    for (int i = 0, next = 0; i < SLOT_FDS; i++)
        s->cgroup[i] = (request->cpu_s >> i & 1) ? fd[next++] : -1;
    s->state = SLOT_FREE;
    if (request->slot >= loop->slots_known)
        loop->slots_known = (int)request->slot + 1;
}

static void *handle_request(struct request *request, int *fd) {
    if (request->slot < 0 || request->slot >= MAX_SLOTS)
        return close_all(fd, SLOT_FDS), NULL;
    struct slot *s = &loop->slots[request->slot];
    if (request->kind == REQUEST_SLOT)
        register_slot(request, fd);
    else if (request->kind == REQUEST_RUN && s->state == SLOT_FREE && fd[FD_PAGE] >= 0)
        return start_program(request, fd);
    else if (request->kind == REQUEST_RUN) {
        report_not_started(request, EBUSY);
        close_all(fd, SLOT_FDS);
    } else if (request->kind == REQUEST_KILL && s->request.call == request->call)
        end_program(s, BY_REQUEST);
    else if (request->kind == REQUEST_PING)
        send_report(&(struct report){.kind = REPORT_PONG, .call = request->call});
    else if (request->kind >= REQUEST_MEMBER && request->kind <= REQUEST_PROCESSES)
        handle_member_request(request, fd);
    return NULL;
}

/* Returns a program's page in the child, NULL when the worker is gone. */
void *serve_loop(void) {
    int64_t last_tick = now_ns();
    for (;;) {
        struct pollfd fds[2] = {{.fd = loop->control_fd, .events = loop->pending ? POLLOUT : POLLIN},
                                {.fd = loop->signal_fd, .events = POLLIN}};
        int was_idle = !loop->running;
        poll(fds, 2, next_timeout_ms(last_tick, now_ns()));
        if (was_idle)
            last_tick = now_ns(); /* the first check of a program comes one tick after its start */
        if (fds[1].revents)
            reap();
        if (fds[0].revents) {
            struct request request;
            int fd[SLOT_FDS], got = -1;
            send_pending_reports();
            while (!loop->pending && (got = receive(&request, fd)) == 1) {
                void *page = handle_request(&request, fd);
                if (page)
                    return page;
                if (now_ns() - last_tick >= TICK_NS)
                    break; /* beside fork bombs a fork takes seconds: programs past their time are killed between two of them */
            }
            if (got == 0)
                return NULL;
        }
        int64_t now = now_ns();
        int due = now - last_tick >= TICK_NS;
        if (due || !loop->running)
            kill_lingering_stubs();
        if (watch_all(due) && due)
            last_tick = now;
    }
}
