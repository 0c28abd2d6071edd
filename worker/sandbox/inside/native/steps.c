/* The confinement of one program, as an ordered list of steps (bottom of this file). Runs in the forked child, before it
 * reads any byte of the caller's data. Every step that is on must succeed: `confine` stops at the first failure. */
#include "zygote.h"
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <sys/mount.h>

struct box {
    struct slot *slot;
    void *page;
    int landlock_fd;
    char folder[600]; /* everything writable is in it */
};

/* A slot's cgroups exist already, with their limits; writing 0 moves the caller. Version 1 uses `tasks`, which for the
 * caller itself skips the kernel's global fork lock (cgroup_procs_write_start), unlike cgroup.procs. */
static int join_cgroups(struct box *b) {
    for (int i = CG_ATTACH; i < SLOT_FDS; i++)
        if (b->slot->cgroup[i] >= 0 && write(b->slot->cgroup[i], "0", 1) != 1)
            return -1;
    return 0;
}

/* Raising the score needs no privilege. Lowering it needs one, which the program does not have. */
static int prefer_as_oom_victim(struct box *b) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int failed = write(fd, "1000", 4) != 4;
    close(fd);
    return failed ? -1 : 0;
}

static int new_session(struct box *b) { return setsid() < 0 ? -1 : 0; }

/* If there is a stub, the zygote has already created the mount namespace (program_start.c). A network namespace is expensive
 * to create and remove, so programs use it one after another; nothing in it outlives a program (program_start.c). */
static int new_namespaces(struct box *b) {
    if (setns(b->slot->network, CLONE_NEWNET))
        return -1;
    return unshare(CLONE_NEWIPC | CLONE_NEWUTS | (config.layers & LAYER_PIDNS ? 0 : CLONE_NEWNS));
}

/* One tmpfs holds everything that is writable: /tmp, /dev/shm, /mnt and /main.py are symlinks into it (see jail.py). It is
 * mounted below /w because a Landlock rule does not cover a mount on the rule's own folder. */
static int mount_workspace(struct box *b) {
    strcpy(b->folder, WORKSPACE);
    char options[64];
    snprintf(options, sizeof options, "size=%lld,nr_inodes=8192,mode=1777", (long long)b->slot->request.folder_bytes);
    if (mount("tmpfs", WORKSPACE, "tmpfs", MS_NOSUID | MS_NODEV, options))
        return -1;
    umask(0);
    int failed = mkdir(WORKSPACE "/tmp", 01777) || mkdir(WORKSPACE "/shm", 01777) || mkdir(WORKSPACE "/mnt", 01777);
    umask(022);
    return failed ? -1 : 0;
}

static const char *name_folder(struct slot *slot, char *path, size_t size) {
    snprintf(path, size, "%s/slot%d", config.scratch, (int)slot->request.slot);
    return path;
}

int clear_folder(struct slot *slot) {
    char path[600];
    return remove_folder(name_folder(slot, path, sizeof path));
}

/* Without a mount namespace: a folder per slot. The supervisor has removed the last program's folder. */
static int make_folder(struct box *b) {
    char tmp[640];
    snprintf(tmp, sizeof tmp, "%s/tmp", name_folder(b->slot, b->folder, sizeof b->folder));
    uid_t uid = config.layers & LAYER_UID ? (uid_t)b->slot->uid : getuid();
    if (mkdir(b->folder, 0700) || mkdir(tmp, 0700) || chown(b->folder, uid, uid) || chown(tmp, uid, uid))
        return -1;
    if (!(config.layers & LAYER_LANDLOCK))
        return 0;
    b->landlock_fd = landlock_new_ruleset();
    for (int i = 0; b->landlock_fd >= 0 && i < config.rule_count; i++)
        if (landlock_allow(b->landlock_fd, config.rules[i].path, config.rules[i].access))
            return -1;
    return b->landlock_fd < 0 ? -1 : landlock_allow(b->landlock_fd, b->folder, 'w');
}

/* The zygote's own /proc must not stay visible: it shows the other programs. */
static int mount_proc(struct box *b) {
    return mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, "hidepid=ptraceable,subset=pid");
}

int send_descriptor(int socket_fd, int fd) {
    char byte = 0;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    return sendmsg(socket_fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == 1 ? 0 : -1;
}

/* The worker fetches files through this descriptor when all processes of the sandbox are dead. */
static int hand_over_folder(struct box *b) {
    int socket_fd = b->slot->fd[FD_FOLDER_SOCKET];
    if (socket_fd < 0)
        return 0;
    int folder = open(b->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return -1;
    int failed = send_descriptor(socket_fd, folder);
    close(folder);
    return failed;
}

/* Before the limits: while other descriptors are in flight, one with few open files can send none. */
static int hand_over_signals(struct box *b) { return config.signal_filter.len ? ask_for_signals() : 0; }

static int map_page(struct box *b) {
    b->page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, b->slot->fd[FD_PAGE], 0);
    return b->page == MAP_FAILED ? -1 : 0;
}

static int arrange_descriptors(struct box *b) {
    int *fd = b->slot->fd;
    int in = fd[FD_STDIN] >= 0 ? fd[FD_STDIN] : open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (dup2(in, 0) < 0 || dup2(fd[FD_STDOUT], 1) < 0 || dup2(fd[FD_STDERR], 2) < 0)
        return -1;
    if (dup3(fd[FD_PAGE], CHILD_FD_PAYLOAD, O_CLOEXEC) < 0)
        return -1;
    const int moves[][2] = {{b->landlock_fd, CHILD_FD_LANDLOCK}, {fd[FD_BINARY], CHILD_FD_BINARY}, {fd[FD_CONTROL], CHILD_FD_CONTROL}};
    for (int i = 0; i < 3; i++) {
        close(moves[i][1]);
        if (moves[i][0] >= 0 && dup3(moves[i][0], moves[i][1], O_CLOEXEC) < 0)
            return -1;
    }
    return syscall(SYS_close_range, CHILD_FD_CONTROL + 1, ~0U, 0) ? -1 : 0;
}

static int enter_folder(struct box *b) {
    char tmp[640];
    snprintf(tmp, sizeof tmp, "%s/tmp", b->folder);
    return chdir(config.layers & LAYER_MOUNTS ? "/tmp" : tmp);
}

static int limit(int what, int64_t soft, int64_t hard) {
    struct rlimit r = {(rlim_t)soft, (rlim_t)hard};
    return setrlimit(what, &r);
}

/* Without a control group the watchdog limits memory; this stops a program that is faster than the watchdog. The limit is
 * generous: threads reserve address space that they never use. */
static int limit_address_space(struct box *b) {
    int64_t most = config.base_address_space + 2 * b->slot->request.memory_bytes + (1LL << 30);
    return limit(RLIMIT_AS, most, most);
}

/* CORE is 1, not 0: with a piped core_pattern the kernel starts the helper even at 0. */
static int set_rlimits(struct box *b) {
    struct request *request = &b->slot->request;
    int64_t processes = request->processes + 1 + config.foreign_processes + (b->slot->is_session ? SESSION_FORKS : 0);
    if (config.layers & LAYER_CGROUP)
        processes += MAX_LINGERING_STUBS; /* the control group still enforces the limit */
    else if (limit_address_space(b))
        return -1;
    return limit(RLIMIT_CPU, request->cpu_s, request->cpu_s + 1) || limit(RLIMIT_FSIZE, request->file_bytes, request->file_bytes) ||
           limit(RLIMIT_NOFILE, request->open_files, request->open_files) || limit(RLIMIT_NPROC, processes, processes) ||
           limit(RLIMIT_CORE, 1, 1) || limit(RLIMIT_MEMLOCK, 65536, 65536) || limit(RLIMIT_MSGQUEUE, 0, 0) ||
           limit(RLIMIT_SIGPENDING, 256, 256) || limit(RLIMIT_STACK, 8 << 20, 8 << 20) || limit(RLIMIT_RTPRIO, 0, 0);
}

/* Raw system calls: libc's versions would signal other threads, and there are none. Also clears all capabilities. */
static int drop_identity(struct box *b) {
    long id = (long)b->slot->uid;
    if (syscall(SYS_setgroups, 0, NULL) || syscall(SYS_setresgid, id, id, id) || syscall(SYS_setresuid, id, id, id))
        return -1;
    /* Dumpable again, so that /proc/self/fd (and /dev/stdin) work; no other program has this uid. */
    return prctl(PR_SET_DUMPABLE, 1);
}

/* In any case: a change of uid clears capabilities only if the old uid was 0, and there may have been no change. An executed
 * file gives none back: the zygote has emptied the bounding set (zygote.py). */
static int drop_capabilities(struct box *b) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    return (int)syscall(SYS_capset, &header, none);
}

/* After the change of uid, because that clears the death signal. */
static int bind_fate(struct box *b) { return prctl(PR_SET_PDEATHSIG, SIGKILL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); }

static int restrict_landlock(struct box *b) {
    if (syscall(SYS_landlock_restrict_self, CHILD_FD_LANDLOCK, 0))
        return -1;
    return close(CHILD_FD_LANDLOCK);
}

/* The second filter. It is useless without the zygote's, so that one's failure fails this step. */
static int install_seccomp(struct box *b) {
    if ((errno = config.filter_error))
        return -1;
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &config.filter);
}

/* The last step runs in program.py: random numbers, files, environment. It ends with `begin`, which marks the program as
 * started. */
static int prepare_in_python(struct box *b) { return 0; }

#define WITHOUT (1U << 31) /* the step is on if the layer is missing */

static int is_on(unsigned layers, unsigned layer) {
    return !layer || (layer & WITHOUT ? !(layers & layer & ~WITHOUT) : layers & layer);
}

static const struct step {
    const char *name;
    int (*apply)(struct box *);
    unsigned layer; /* 0: always */
} STEPS[] = {
    {"cgroup", join_cgroups, LAYER_CGROUP},
    {"oom_victim", prefer_as_oom_victim, 0},
    {"session", new_session, 0},
    {"namespaces", new_namespaces, LAYER_MOUNTS},
    {"workspace", mount_workspace, LAYER_MOUNTS},
    {"own_folder", make_folder, WITHOUT | LAYER_MOUNTS},
    {"proc", mount_proc, LAYER_MOUNTS},
    {"folder_out", hand_over_folder, 0},
    {"signals", hand_over_signals, WITHOUT | LAYER_PIDNS},
    {"page", map_page, 0},
    {"descriptors", arrange_descriptors, 0},
    {"folder", enter_folder, 0},
    {"rlimits", set_rlimits, 0},
    {"identity", drop_identity, LAYER_UID},
    {"capabilities", drop_capabilities, 0},
    {"fate", bind_fate, 0},
    {"landlock", restrict_landlock, LAYER_LANDLOCK},
    {"seccomp", install_seccomp, LAYER_SECCOMP},
    {"prepare", prepare_in_python, 0},
};

int step_count(void) { return sizeof STEPS / sizeof *STEPS; }
const char *step_name(int index) { return STEPS[index].name; }

void *confine(struct slot *slot) {
    struct box box = {.slot = slot, .landlock_fd = config.landlock_fd};
    struct progress *progress = &config.progress[slot->request.slot];
    for (int i = 0; i < step_count(); i++) {
        if (!is_on(config.layers, STEPS[i].layer))
            continue;
        progress->step = i + 1;
        errno = 0;
        int failed = STEPS[i].apply(&box);
        if (config.faults && slot->request.fail_step == i + 1) {
            failed = 1;
            errno = ECANCELED;
        }
        if (failed) {
            progress->error = errno ? errno : EINVAL;
            return NULL;
        }
    }
    return box.page;
}
