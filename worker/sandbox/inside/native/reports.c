/* The zygote's reports to its worker. */
#include "zygote.h"

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

void send_pending_reports(void) {
    for (; loop->pending && try_send(&loop->pending_reports[loop->first_pending]); loop->pending--)
        loop->first_pending = (loop->first_pending + 1) % MAX_PENDING_REPORTS;
}

void report_not_started(struct request *request, int step, int error) {
    struct report report = {.kind = REPORT_ENDED, .slot = request->slot, .call = request->call, .step = step, .error = error};
    send_report(&report);
}
