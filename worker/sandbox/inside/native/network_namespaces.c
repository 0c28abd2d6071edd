/* One network namespace for each running program: abstract socket names are per network namespace, so no two programs can
 * meet. */
#include "zygote.h"

static int new_network(void) {
    if (unshare(CLONE_NEWNET))
        return -1;
    int network = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (setns(loop->own_netns_fd, CLONE_NEWNET))
        _exit(1); /* fail closed: this process would stay in a program's namespace */
    return network;
}

int take_network(struct slot *s) {
    s->network = -1;
    if (!(config.layers & LAYER_MOUNTS))
        return 0;
    s->network = loop->networks_idle ? loop->networks[--loop->networks_idle] : new_network();
    return s->network < 0 ? -1 : 0;
}

/* A socket outlives its program while it is in flight (SCM_RIGHTS), for example to itself. The next program would see its
 * name. */
static int has_no_sockets(int network) {
    char text[256];
    if (setns(network, CLONE_NEWNET))
        return 0;
    int fd = open("/proc/self/net/unix", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text);
    if (fd >= 0)
        close(fd);
    if (setns(loop->own_netns_fd, CLONE_NEWNET))
        _exit(1);
    return n > 0 && memchr(text, '\n', (size_t)n) == text + n - 1; /* only the header line */
}

void give_back_network(struct slot *s) {
    if (s->network >= 0 && loop->networks_idle < MAX_IDLE_NETWORKS && has_no_sockets(s->network))
        loop->networks[loop->networks_idle++] = s->network;
    else if (s->network >= 0)
        close(s->network);
    s->network = -1;
}
