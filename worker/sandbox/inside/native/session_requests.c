/* Requests about the members of a session: add, interrupt, end, measure. */
#define _GNU_SOURCE
#include "session_members.h"
#include "watchdog.h"
#include "zygote.h"
#include <errno.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

/* Registers the fork that sent hello. It has to be a child of this zygote that has no other role. */
static struct member *register_fork(struct request *request, int hello_fd) {
    int64_t uid = -1;
    pid_t pid = hello_sender(hello_fd, &uid);
    int is_foreign_uid = config.layers & LAYER_UID && uid != loop->slots[request->slot].uid;
    if (pid < 0 || member_by_pid(pid) || lingering_stub_by_pid(pid) || is_foreign_uid) {
        errno = ESRCH;
        return NULL;
    }
    for (int i = 0; i < loop->slots_known; i++)
        if (loop->slots[i].state > SLOT_FREE && (loop->slots[i].child == pid || loop->slots[i].stub == pid)) {
            errno = ESRCH;
            return NULL;
        }
    return member_add((int)request->slot, request->member, pid);
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
    if (!m || (has_leaf && member_enter_leaf(m, program_of(m), leaf, (int)request->flags)))
        answer.error = errno ? errno : EINVAL;
    if (has_hello)
        close(fd[0]);
    if (!m && has_leaf)
        close_all(leaf, LEAF_FDS);
    if (m && answer.error)
        member_kill(m);
    send_report(&answer);
}

/* How long a session's process has starved in its cell. */
static int64_t measure_member_starvation(struct member *m, int64_t now) {
    if (m->leaf_usage >= 0)
        return meter_group(&m->meter, m->leaf_usage, m->leaf_threads, &m->known, now);
    return meter_one(&m->meter, program_of(m), m->pid, loop->slots[m->slot].stub ? 0 : 1, now);
}

static void begin_cell(struct member *m) {
    if (m->leaf_usage < 0) {
        meter_start_one(&m->meter, program_of(m), now_ns());
        return;
    }
    meter_start(&m->meter, m->leaf_usage, now_ns());
    meter_know(&m->known, m->leaf_threads);
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
    if (request->kind == REQUEST_MEMBER) {
        add_member(request, fd);
        return;
    }
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
        member_kill(m);
    else if (request->flags & USAGE_BEGIN)
        begin_cell(m);
    else
        report_usage(m);
}
