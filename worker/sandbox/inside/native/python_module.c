/* The Python module `_zygote`. `serve` returns to Python only in a confined child. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "syscall_table.h"
#include "zygote.h"
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <sys/mount.h>
#include <sys/signalfd.h>

#define MAIN_FILE "/main.py"
#define PLAIN_PAYLOAD 'p'
#define MOUNT_SETATTR 442 /* the same on every architecture; older headers lack it */
enum { VALUE_LENGTH_AT = 8, VALUE_AT = 16 };

struct zygote_config config = {.landlock_fd = -1};
struct loop_state *loop;
struct progress *own_progress;
static char *own_page; /* in a program */

static PyObject *fail(const char *what) { return PyErr_SetFromErrnoWithFilename(PyExc_OSError, what); }

static PyObject *none_unless(int failed, const char *what) { return failed ? fail(what) : Py_NewRef(Py_None); }

static int read_rules(PyObject *rules) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rules); i++) {
        const char *path, *access;
        struct rule *rule = &config.rules[config.rule_count];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(rules, i), "ss", &path, &access))
            return -1;
        if (config.rule_count >= (int)(sizeof config.rules / sizeof *config.rules) || strlen(path) >= sizeof rule->path)
            return PyErr_SetString(PyExc_ValueError, "too many or too long Landlock rules"), -1;
        strcpy(rule->path, path);
        rule->access = *access;
        config.rule_count++;
    }
    return 0;
}

/* With mount namespaces all programs write to the same path, so one ruleset serves all of them. */
static int make_ruleset(void) {
    if (!(config.layers & LAYER_LANDLOCK) || !(config.layers & LAYER_MOUNTS))
        return 0;
    config.landlock_fd = landlock_new_ruleset();
    if (config.landlock_fd < 0)
        return fail("landlock_create_ruleset"), -1;
    for (int i = 0; i < config.rule_count; i++)
        if (landlock_allow(config.landlock_fd, config.rules[i].path, config.rules[i].access))
            return fail(config.rules[i].path), -1;
    return 0;
}

/* `bytes` belongs to a Python object that lives as long as the zygote. */
static struct sock_fprog as_filter(const char *bytes, Py_ssize_t size) {
    return (struct sock_fprog){(unsigned short)((size_t)size / sizeof(struct sock_filter)), (struct sock_filter *)bytes};
}

/* In the child, before the program runs. */
static int write_new_file(const char *path, const char *data, Py_ssize_t size) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    ssize_t n = 0;
    for (Py_ssize_t at = 0; fd >= 0 && n >= 0 && at < size; at += n)
        n = write(fd, data + at, (size_t)(size - at));
    return fd < 0 || n < 0 || close(fd) ? -1 : 0;
}

/* In the confined child: reads the caller's first bytes (payload.py). */
static PyObject *read_payload(void) {
    struct stat st;
    ssize_t size = fstat(CHILD_FD_PAYLOAD, &st) ? 0 : st.st_size - PAGE_BYTES;
    char *data = size > 0 ? malloc((size_t)size) : NULL;
    for (ssize_t at = 0, n; data && at < size; at += n)
        if ((n = pread(CHILD_FD_PAYLOAD, data + at, (size_t)(size - at), PAGE_BYTES + at)) <= 0)
            return fail("payload"); /* the process ends */
    /* If it is not cut off, a session holds this memory. */
    if (!data || (*data != PLAIN_PAYLOAD && ftruncate(CHILD_FD_PAYLOAD, PAGE_BYTES)))
        return fail("payload");
    close(CHILD_FD_PAYLOAD);
    int is_plain = *data == PLAIN_PAYLOAD; /* written to its file at once, where all programs have the same path */
    if (is_plain && config.layers & LAYER_MOUNTS && write_new_file(MAIN_FILE, data + 1, size - 1))
        return fail(MAIN_FILE);
    PyObject *payload = is_plain ? PyUnicode_DecodeUTF8(data + 1, size - 1, "surrogatepass")
                                 : PyBytes_FromStringAndSize(data + 1, size - 1);
    free(data);
    return payload;
}

static PyObject *map_state(int control_fd) {
    config.progress = mmap(NULL, sizeof(struct progress) * MAX_SLOTS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    loop = mmap(NULL, sizeof *loop, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (config.progress == MAP_FAILED || loop == MAP_FAILED)
        return fail("mmap");
    loop->control_fd = control_fd;
    loop->signal_fd = loop->own_pidns_fd = loop->own_mntns_fd = loop->own_netns_fd = -1;
    return Py_None;
}

/* Opens what the loop needs: its own namespaces, to return to after a fork, and the signals of its children. */
static PyObject *open_descriptors(void) {
    for (int fd; (fd = open("/dev/null", O_RDWR | O_CLOEXEC)) < FIRST_FREE_FD;)
        if (fd < 0)
            return fail("/dev/null");
    if (make_ruleset()) /* after the fillers, so that its number is high */
        return NULL;
    if (config.layers & LAYER_PIDNS && (loop->own_pidns_fd = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC)) < 0)
        return fail("/proc/self/ns/pid");
    if (config.layers & LAYER_MOUNTS && /* setns checks that returning is possible */
        ((loop->own_mntns_fd = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC)) < 0 || setns(loop->own_mntns_fd, CLONE_NEWNS)))
        return fail("/proc/self/ns/mnt");
    if (config.layers & LAYER_MOUNTS && (loop->own_netns_fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)) < 0)
        return fail("/proc/self/ns/net");
    sigset_t child_signal;
    sigemptyset(&child_signal);
    sigaddset(&child_signal, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child_signal, &loop->python_signals);
    loop->signal_fd = signalfd(-1, &child_signal, SFD_NONBLOCK | SFD_CLOEXEC);
    return loop->signal_fd < 0 ? fail("signalfd") : Py_None;
}

static PyObject *py_serve(PyObject *Py_UNUSED(self), PyObject *args) {
    const char *early, *late, *signals, *scratch;
    int control_fd;
    Py_ssize_t early_bytes, late_bytes, signals_bytes;
    PyObject *rules;
    if (!PyArg_ParseTuple(args, "iIO!y#y#y#sLpLL", &control_fd, &config.layers, &PyList_Type, &rules, &early, &early_bytes, &late,
                          &late_bytes, &signals, &signals_bytes, &scratch, &config.foreign_processes, &config.faults, &config.first_uid, &config.last_uid))
        return NULL;
    if (read_rules(rules))
        return NULL;
    snprintf(config.scratch, sizeof config.scratch, "%s", scratch);
    config.filter = as_filter(late, late_bytes);
    config.signal_filter = as_filter(signals, signals_bytes);
    huge_pages_settle();
    if (!map_state(control_fd))
        return NULL;
    small_objects_prepare();
    char pages[64];
    read_proc_file(getpid(), "statm", pages, sizeof pages); /* without the reservation for the warm heap */
    config.base_address_space = strtoll(pages, NULL, 10) * sysconf(_SC_PAGESIZE);
    remember_own_memory();
    find_thread_addresses();
    if (!open_descriptors())
        return NULL;
    /* Every child inherits this filter and adds the second one (seccomp.py), or fails with its error at its step `seccomp`. */
    struct sock_fprog filter = as_filter(early, early_bytes);
    if (config.layers & LAYER_SECCOMP &&
        (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter)))
        config.filter_error = errno;
    send_report(&(struct report){.kind = REPORT_READY, .call = getpid()});
    void *page = serve_loop();
    if (!page)
        _exit(0);
    own_page = page;
    small_objects_open();
    return read_payload();
}

/* In the child, when everything is ready. From here on the process is the program's and nothing that it reports is trusted. */
static PyObject *py_begin(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    own_progress->ready_ns = now_ns();
    if (munmap(config.progress, sizeof(struct progress) * MAX_SLOTS))
        _exit(EXIT_NOT_CONFINED);
    Py_RETURN_NONE;
}

/* The program's own report, in the layout of payload.py. */
static PyObject *py_report_completed(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    own_page[0] = 1;
    Py_RETURN_NONE;
}

static PyObject *py_report_value(PyObject *Py_UNUSED(self), PyObject *value) {
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(value, &data, &size))
        return NULL;
    uint64_t kept = (uint64_t)size < PAGE_BYTES - VALUE_AT ? (uint64_t)size : PAGE_BYTES - VALUE_AT, length = kept + 1;
    memcpy(own_page + VALUE_AT, data, kept);
    memcpy(own_page + VALUE_LENGTH_AT, &length, sizeof length);
    Py_RETURN_NONE;
}

static PyObject *py_write_file(PyObject *Py_UNUSED(self), PyObject *args) {
    const char *path, *data;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "sy#", &path, &data, &size))
        return NULL;
    return none_unless(write_new_file(path, data, size), path);
}

/* In a session, which has one thread. Returns 0 in the fork. */
static PyObject *py_fork_sibling(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    PyOS_BeforeFork();
    pid_t pid = fork_sibling();
    int error = errno;
    if (pid == 0)
        PyOS_AfterFork_Child();
    else
        PyOS_AfterFork_Parent();
    errno = error;
    return pid < 0 ? fail("clone") : PyLong_FromLong(pid);
}

/* In a session: returns the next message of the worker and the numbers of its descriptors; no bytes when the worker is gone.
 * In C because not every zygote has loaded the module `socket`. */
static PyObject *py_receive(PyObject *Py_UNUSED(self), PyObject *control_fd) {
    char text[65536];
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * 160)];
    } control;
    int from = (int)PyLong_AsLong(control_fd);
    struct iovec space = {text, sizeof text};
    struct msghdr message = {.msg_iov = &space, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;
    do {
        Py_BEGIN_ALLOW_THREADS;
        n = recvmsg(from, &message, MSG_CMSG_CLOEXEC);
        Py_END_ALLOW_THREADS;
    } while (n < 0 && errno == EINTR && !PyErr_CheckSignals());
    if (n < 0)
        return PyErr_Occurred() ? NULL : fail("recvmsg");
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    int has_fds = c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS, *fds = (int *)CMSG_DATA(&control.header);
    size_t count = has_fds ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
    for (size_t i = 0; i < count; i++)
        if (fds[i] < FIRST_FREE_FD) { /* a cell closed one of the reserved numbers */
            int low = fds[i];
            fds[i] = fcntl(low, F_DUPFD_CLOEXEC, FIRST_FREE_FD);
            close(low);
        }
    return Py_BuildValue("y#y#", text, (Py_ssize_t)n, (char *)fds, (Py_ssize_t)(count * sizeof(int)));
}

/* A session adopts the orphans of its children, and returns freed memory to the kernel. The zygote (jail.py) and programs do
 * not return it: programs end before that would pay. */
static PyObject *py_become_session(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    mallopt(M_TRIM_THRESHOLD, 4 << 20);
    return none_unless(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER");
}

static PyObject *py_steps(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    PyObject *names = PyTuple_New(step_count());
    for (int i = 0; names && i < step_count(); i++)
        PyTuple_SET_ITEM(names, i, PyUnicode_FromString(step_name(i)));
    return names;
}

static PyObject *py_landlock_abi(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    return PyLong_FromLong(landlock_abi());
}

static PyObject *py_limit_landlock(PyObject *Py_UNUSED(self), PyObject *abi) {
    limit_landlock((int)PyLong_AsLong(abi));
    return none_unless(PyErr_Occurred() != NULL, "limit_landlock");
}

/* Makes one mount read-only, and nothing else of it. */
static PyObject *py_make_read_only(PyObject *Py_UNUSED(self), PyObject *text) {
    const char *path = PyUnicode_AsUTF8(text);
    struct { uint64_t set, clear, propagation, user_namespace; } change = {MS_RDONLY, 0, 0, 0}; /* MOUNT_ATTR_RDONLY is 1 too */
    return path ? none_unless((int)syscall(MOUNT_SETATTR, AT_FDCWD, path, 0, &change, sizeof change), path) : NULL;
}

/* Empties the bounding set and drops these capabilities, for this process and its children. False: not permitted. */
static PyObject *py_drop_capabilities(PyObject *Py_UNUSED(self), PyObject *bits) {
    unsigned long long given_up = PyLong_AsUnsignedLongLongMask(bits);
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2];
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) || syscall(SYS_capget, &header, sets))
        return fail("capget");
    for (int capability = 0, is_bounded; (is_bounded = prctl(PR_CAPBSET_READ, capability, 0, 0, 0)) >= 0; capability++)
        if (is_bounded && prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
            Py_RETURN_FALSE; /* without CAP_SETPCAP; no_new_privs still protects */
    for (int i = 0; i < 2; i++) {
        unsigned kept = ~(unsigned)(given_up >> 32 * i);
        sets[i].effective &= kept, sets[i].permitted &= kept, sets[i].inheritable = 0;
    }
    if (syscall(SYS_capset, &header, sets))
        return fail("capset");
    Py_RETURN_TRUE;
}

static PyObject *py_use_huge_pages(PyObject *Py_UNUSED(self), PyObject *most) {
    return none_unless(huge_pages_init(PyLong_AsSize_t(most)), "mmap");
}

static PyObject *py_make_all_immortal(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    return PyLong_FromLong(make_all_immortal());
}

static PyObject *py_forbid_dumps(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    return none_unless(prctl(PR_SET_DUMPABLE, 0), "PR_SET_DUMPABLE");
}

static PyObject *py_remove_folder(PyObject *Py_UNUSED(self), PyObject *text) {
    const char *path = PyUnicode_AsUTF8(text);
    return path ? none_unless(remove_folder(path), path) : NULL;
}

static PyMethodDef METHODS[] = {
    {"serve", py_serve, METH_VARARGS, "Fork programs. Returns in a child: plain code, or the bytes of a payload."},
    {"begin", py_begin, METH_NOARGS, "Mark the program as started and unmap the progress page."},
    {"report_completed", py_report_completed, METH_NOARGS, "Report that the program reached its last line."},
    {"report_value", py_report_value, METH_O, "Report the bytes of the program's value, cut to the page."},
    {"write_file", py_write_file, METH_VARARGS, "Write a new file."},
    {"fork_sibling", py_fork_sibling, METH_NOARGS, "In a session: fork a sibling of this process. Returns 0 in it."},
    {"receive", py_receive, METH_O, "In a session: receive the next message of the worker and its descriptors."},
    {"become_session", py_become_session, METH_NOARGS, "In a session: adopt orphans, return freed memory to the kernel."},
    {"steps", py_steps, METH_NOARGS, "The names of the child's set-up steps, in order."},
    {"landlock_abi", py_landlock_abi, METH_NOARGS, "The kernel's Landlock ABI, or -1."},
    {"limit_landlock", py_limit_landlock, METH_O, "Act as if the kernel's Landlock had at most this ABI."},
    {"make_read_only", py_make_read_only, METH_O, "Make the mount at this path read-only."},
    {"drop_capabilities", py_drop_capabilities, METH_O, "Empty the bounding set and drop the capabilities of this bit set."},
    {"use_huge_pages", py_use_huge_pages, METH_O, "Put Python's objects on huge pages, up to this many bytes, until `serve`."},
    {"make_all_immortal", py_make_all_immortal, METH_NOARGS, "Stop counting references to the objects that there are. Returns their number."},
    {"remove_folder", py_remove_folder, METH_O, "Remove a folder and everything below it, if it exists. Follows no link."},
    {"forbid_dumps", py_forbid_dumps, METH_NOARGS, "Make /proc/PID of this process readable by root only."},
    {0},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "_zygote", .m_size = -1, .m_methods = METHODS};

PyMODINIT_FUNC PyInit__zygote(void) {
    PyObject *module = PyModule_Create(&MODULE);
    PyObject *table = PyDict_New();
    if (!module || !table)
        return NULL;
    for (size_t i = 0; i < sizeof SYSCALL_TABLE / sizeof *SYSCALL_TABLE; i++) {
        PyObject *number = PyLong_FromLong(SYSCALL_TABLE[i].number);
        if (!number || PyDict_SetItemString(table, SYSCALL_TABLE[i].name, number))
            return NULL;
        Py_DECREF(number);
    }
    if (PyModule_AddObject(module, "SYSCALLS", table))
        return NULL;
    PyModule_AddStringConstant(module, "MAIN_FILE", MAIN_FILE);
    PyObject *layers = Py_BuildValue("{sisisisisisi}", "pidns", LAYER_PIDNS, "mntns", LAYER_MOUNTS, "uid", LAYER_UID, "cgroup",
                                     LAYER_CGROUP, "landlock", LAYER_LANDLOCK, "seccomp", LAYER_SECCOMP);
    return PyModule_AddObject(module, "LAYERS", layers) ? NULL : module;
}
