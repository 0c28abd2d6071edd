/* The zygote's loop: fork a confined child per request, end it by its limits, reap it, report what the kernel measured.
 *
 * Runs in the warm interpreter without touching its heap, so that pages stay shared with the children. The parent never reads
 * a byte of the caller's. */
#define _GNU_SOURCE
#include "raw.h"
#include "zygote.h"
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define TICK_NS 50000000LL
#define LOOK_AGAIN_NS 5000000LL /* after a look at a program that has nearly used up its time */
#define ROUND_MOST_NS 100000000LL
#define CLEARING_MOST_NS 30000000000LL

/* While the keeper removes what the last program left, this one's time has not begun. */
static int64_t began_ns(struct slot *s, int64_t now) {
    if (s->stub || now - s->forked_ns > CLEARING_MOST_NS)
        return s->forked_ns;
    int64_t cleared_ns = house.progress[s - book->slots].cleared_ns;
    return cleared_ns ? cleared_ns : now;
}

/* On a busy machine a program gets the time that it was promised: its limit counts the time that it had, its deadline all time.
 * Returns what is used up, or 0; `due_ns` becomes the time at which that happens if it starves no more. */
static int time_is_up(struct slot *s, int64_t now) {
    int64_t began = began_ns(s, now), starved = look_at_cpu(s, now);
    int64_t wall_due = began + s->ask.wall_ns + starved, deadline = began + s->ask.deadline_ns;
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
        if (is_watched(s) && too_much_memory(s))
            end(s, BY_MEMORY);
        return;
    }
    int used_up = time_is_up(s, now);
    if (used_up)
        end(s, used_up);
    else if (file_size(s->fd[FD_STDOUT]) > s->ask.output_bytes || file_size(s->fd[FD_STDERR]) > s->ask.output_bytes)
        end(s, BY_OUTPUT);
    else if (read_ooms(s).kills > s->ooms_before.kills)
        end(s, BY_MEMORY);
    else if (!(house.layers & LAYER_CGROUP) && too_much_memory(s))
        end(s, BY_MEMORY);
    else
        sample_processes(s);
}

/* A look at every program, at those past their deadline at any time. Where no control group counts, a look at a fork bomb takes
 * long: then the round is cut short and goes on with the next program, so that the worker is heard in between. */
static int watch_all(int due) {
    int64_t began = now_ns(), now = began;
    for (int seen = 0; book->running && seen < book->slots_known; seen++) {
        struct slot *s = &book->slots[book->next_watched % book->slots_known];
        book->next_watched = (book->next_watched + 1) % book->slots_known;
        if (due || s->due_ns <= now)
            watch(s, now);
        if ((now = now_ns()) - began > ROUND_MOST_NS)
            return 0;
    }
    return 1;
}

static int next_timeout_ms(int64_t last_tick, int64_t now) {
    if (!book->running)
        return -1;
    int64_t next = last_tick + TICK_NS;
    for (int i = 0; i < book->slots_known; i++)
        if (book->slots[i].state == SLOT_RUNNING && book->slots[i].due_ns < next)
            next = book->slots[i].due_ns;
    return next <= now ? 0 : (int)((next - now + 999999) / 1000000);
}

static int receive(struct ask *ask, int *fd, int most) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * SLOT_FDS)];
    } control;
    struct iovec data = {ask, sizeof *ask};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n = raw4(SYS_recvmsg, control_fd, (long)&message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT, 0);
    if (n <= 0)
        return n == -EAGAIN || n == -EINTR ? -1 : 0;
    for (int i = 0; i < most; i++)
        fd[i] = -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fd, CMSG_DATA(c), sizeof(int) * (count < (size_t)most ? count : (size_t)most));
        }
    return (size_t)n == sizeof *ask ? 1 : -1;
}

/* ASK_SLOT: wall_ns carries the uid, cpu_s a bit per descriptor that is present. */
static void learn_slot(struct ask *ask, int *fd) {
    struct slot *s = &book->slots[ask->slot];
    int named = __builtin_popcountll((unsigned long long)ask->cpu_s);
    if ((house.layers & LAYER_UID && (ask->wall_ns < house.first_uid || ask->wall_ns > house.last_uid)) || s->state > SLOT_FREE ||
        named > SLOT_FDS || (named && fd[named - 1] < 0)) { /* descriptors are lost where there is no room for more */
        close_all(fd, SLOT_FDS); /* a worker cannot choose whom a program runs as, nor change the place of one that runs */
        return;
    }
    if (s->state == SLOT_FREE) /* a session's place, in which nothing could be started last time */
        close_all(s->cgroup, SLOT_FDS);
    s->uid = ask->wall_ns;
    for (int i = 0, next = 0; i < SLOT_FDS; i++)
        s->cgroup[i] = (ask->cpu_s >> i & 1) ? fd[next++] : -1;
    s->state = SLOT_FREE;
    if (ask->slot >= book->slots_known)
        book->slots_known = (int)ask->slot + 1;
}

static void *obey(struct ask *ask, int *fd) {
    if (ask->slot < 0 || ask->slot >= MAX_SLOTS)
        return close_all(fd, SLOT_FDS), NULL;
    struct slot *s = &book->slots[ask->slot];
    switch (ask->kind) {
    case ASK_SLOT:
        learn_slot(ask, fd);
        return NULL;
    case ASK_RUN:
        if (s->state == SLOT_FREE && fd[FD_PAGE] >= 0)
            return start(ask, fd);
        say_not_started(ask, -1, EBUSY);
        close_all(fd, SLOT_FDS);
        return NULL;
    case ASK_KILL:
        if (s->ask.call == ask->call)
            end(s, BY_REQUEST);
        return NULL;
    case ASK_PING:
        say(&(struct say){.kind = SAY_PONG, .call = ask->call});
        return NULL;
    case ASK_MEMBER:
    case ASK_INTERRUPT:
    case ASK_END_MEMBER:
    case ASK_USAGE:
    case ASK_PROCESSES:
        obey_about_member(ask, fd);
        return NULL;
    }
    return NULL;
}

/* Returns a program's page in the child; NULL when the worker is gone. */
void *serve_loop(void) {
    int64_t last_tick = now_ns();
    for (;;) {
        struct pollfd fds[2] = {{.fd = control_fd, .events = book->says ? POLLOUT : POLLIN}, {.fd = signal_fd, .events = POLLIN}};
        int was_idle = !book->running;
        poll(fds, 2, next_timeout_ms(last_tick, now_ns()));
        if (was_idle)
            last_tick = now_ns(); /* the first look at a program comes one tick after it started */
        if (fds[1].revents)
            reap();
        if (fds[0].revents) {
            struct ask ask;
            int fd[SLOT_FDS], got = -1;
            send_waiting_says();
            while (!book->says && (got = receive(&ask, fd, SLOT_FDS)) == 1) {
                void *page = obey(&ask, fd);
                if (page)
                    return page;
            }
            if (got == 0)
                return NULL;
        }
        int64_t now = now_ns();
        int due = now - last_tick >= TICK_NS;
        if (due || !book->running)
            dismiss_leavers();
        if (watch_all(due) && due)
            last_tick = now;
    }
}
