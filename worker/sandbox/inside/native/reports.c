/* The zygote's messages to its worker. */
#define _GNU_SOURCE
#include "zygote.h"
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

/* 0 if it has to be tried again: the socket is full, or the kernel lacks memory. A worker that is gone needs no answer. */
static int sent(const struct say *message) {
    return send(control_fd, message, sizeof *message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 || errno == EPIPE || errno == ECONNRESET ||
           errno == ENOTCONN;
}

/* Never waits for the worker: meanwhile nobody would enforce a limit. What does not fit into the socket is sent when there is room.
 * Until then no request is read, so that only ends can be added, of which there are no more than slots and members. */
void say(const struct say *message) {
    if (!book->says && sent(message))
        return;
    if (book->says == SAYS_MOST)
        _exit(1); /* unreachable */
    book->waiting_says[(book->first_say + book->says++) % SAYS_MOST] = *message;
}

void send_waiting_says(void) {
    for (; book->says && sent(&book->waiting_says[book->first_say]); book->says--)
        book->first_say = (book->first_say + 1) % SAYS_MOST;
}

void say_not_started(struct ask *ask, int step, int error) {
    struct say message = {.kind = SAY_ENDED, .slot = ask->slot, .call = ask->call, .step = step, .error = error};
    say(&message);
}
