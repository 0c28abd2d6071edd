/* The Python module `_zygote`. `serve` returns to Python only in a confined child. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include "folder.h"
#include "forking.h"
#include "huge_pages.h"
#include "landlock.h"
#include "small_objects.h"
#include "syscall_table.h"
#include "watchdog.h"
#include "zygote.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAIN_FILE "/main.py"
#define PLAIN_PAYLOAD 'p'
enum { VALUE_LENGTH_AT = 8, VALUE_AT = 16 };

struct house house = {.landlock_fd = -1};
struct book *book;
int control_fd = -1, signal_fd = -1, own_pidns_fd = -1, own_mntns_fd = -1, own_netns_fd = -1;
sigset_t python_signals;
struct progress *own_progress;
static char *own_page; /* in a program */

static PyObject *fail(const char *what) { return PyErr_SetFromErrnoWithFilename(PyExc_OSError, what); }

static int64_t own_address_space(void) {
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    int64_t pages = read_number(fd);
    if (fd >= 0)
        close(fd);
    return pages * sysconf(_SC_PAGESIZE);
}

static int read_rules(PyObject *rules) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rules); i++) {
        const char *path, *access;
        struct rule *rule = &house.rules[house.rule_count];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(rules, i), "ss", &path, &access))
            return -1;
        if (house.rule_count >= (int)(sizeof house.rules / sizeof *house.rules) || strlen(path) >= sizeof rule->path)
            return PyErr_SetString(PyExc_ValueError, "too many or too long Landlock rules"), -1;
        strcpy(rule->path, path);
        rule->access = *access;
        house.rule_count++;
    }
    return 0;
}

/* With mount namespaces all programs write to the same path, so that one ruleset serves all. */
static int make_ruleset(void) {
    if (!(house.layers & LAYER_LANDLOCK) || !(house.layers & LAYER_MOUNTS))
        return 0;
    house.landlock_fd = landlock_new_ruleset();
    if (house.landlock_fd < 0)
        return fail("landlock_create_ruleset"), -1;
    for (int i = 0; i < house.rule_count; i++)
        if (landlock_allow(house.landlock_fd, house.rules[i].path, house.rules[i].access))
            return fail(house.rules[i].path), -1;
    return 0;
}

/* The bytes are those of Python objects that live as long as the zygote. */
static struct sock_fprog as_filter(const char *bytes, Py_ssize_t size) {
    return (struct sock_fprog){(unsigned short)((size_t)size / sizeof(struct sock_filter)), (struct sock_filter *)bytes};
}

/* Inherited by every child, which adds the rest (seccomp.py). */
static int put_on_filter(struct sock_fprog filter) {
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter);
}

/* In the child, before the program runs: nothing is in its way yet. */
static int write_new_file(const char *path, const char *data, Py_ssize_t size) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    ssize_t n = 0;
    for (Py_ssize_t at = 0; fd >= 0 && n >= 0 && at < size; at += n)
        n = write(fd, data + at, (size_t)(size - at));
    return fd < 0 || n < 0 || close(fd) ? -1 : 0;
}

/* Plain code goes to its place right away, where that is the same for all. */
static PyObject *take_code(const char *code, Py_ssize_t size) {
    if (house.layers & LAYER_MOUNTS && write_new_file(MAIN_FILE, code, size))
        return fail(MAIN_FILE);
    return PyUnicode_DecodeUTF8(code, size, "surrogatepass");
}

/* In the child, when it is confined: the first bytes of the caller's (payload.py). */
static PyObject *read_payload(void) {
    struct stat st;
    ssize_t size = fstat(CHILD_FD_PAYLOAD, &st) ? 0 : st.st_size - PAGE_BYTES;
    char *data = size > 0 ? malloc((size_t)size) : NULL;
    for (ssize_t at = 0, n; data && at < size; at += n)
        if ((n = pread(CHILD_FD_PAYLOAD, data + at, (size_t)(size - at), PAGE_BYTES + at)) <= 0) {
            free(data);
            return fail("payload");
        }
    if (!data)
        return fail("payload");
    if (*data != PLAIN_PAYLOAD && ftruncate(CHILD_FD_PAYLOAD, PAGE_BYTES)) /* a session would keep its files here as long as it lives */
        return fail("payload");
    close(CHILD_FD_PAYLOAD);
    PyObject *payload = *data == PLAIN_PAYLOAD ? take_code(data + 1, size - 1) : PyBytes_FromStringAndSize(data + 1, size - 1);
    free(data);
    return payload;
}

static PyObject *py_serve(PyObject *self, PyObject *args) {
    (void)self;
    const char *early, *late, *scratch;
    Py_ssize_t early_bytes, late_bytes;
    PyObject *rules;
    if (!PyArg_ParseTuple(args, "iIO!y#y#sLpLL", &control_fd, &house.layers, &PyList_Type, &rules, &early, &early_bytes, &late,
                          &late_bytes, &scratch, &house.foreign_processes, &house.faults, &house.first_uid, &house.last_uid))
        return NULL;
    if (read_rules(rules))
        return NULL;
    snprintf(house.scratch, sizeof house.scratch, "%s", scratch);
    house.filter = as_filter(late, late_bytes);
    heap_settle();
    house.progress = mmap(NULL, sizeof(struct progress) * MAX_SLOTS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    book = mmap(NULL, sizeof *book, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (house.progress == MAP_FAILED || book == MAP_FAILED)
        return fail("mmap");
    nursery_prepare();
    house.base_address_space = own_address_space(); /* without what was reserved for the warm heap */
    remember_own_memory();
    learn_thread_addresses();
    for (int fd; (fd = open("/dev/null", O_RDWR | O_CLOEXEC)) < FIRST_FREE_FD;)
        if (fd < 0)
            return fail("/dev/null");
    if (make_ruleset()) /* after the fillers, so that its number is high */
        return NULL;
    if (house.layers & LAYER_PIDNS && (own_pidns_fd = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC)) < 0)
        return fail("/proc/self/ns/pid");
    if (house.layers & LAYER_MOUNTS && /* and there is a way back */
        ((own_mntns_fd = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC)) < 0 || setns(own_mntns_fd, CLONE_NEWNS)))
        return fail("/proc/self/ns/mnt");
    if (house.layers & LAYER_MOUNTS && (own_netns_fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)) < 0)
        return fail("/proc/self/ns/net");
    sigset_t child_signal;
    sigemptyset(&child_signal);
    sigaddset(&child_signal, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child_signal, &python_signals);
    signal_fd = signalfd(-1, &child_signal, SFD_NONBLOCK | SFD_CLOEXEC);
    if (signal_fd < 0)
        return fail("signalfd");
    if (house.layers & LAYER_SECCOMP && put_on_filter(as_filter(early, early_bytes)))
        house.filter_error = errno; /* of every child, whose step it belongs to */
    say(&(struct say){.kind = SAY_READY, .call = getpid()});
    void *page = serve_loop();
    if (!page)
        _exit(0);
    own_page = page;
    nursery_open();
    return read_payload();
}

/* In the child, when everything is ready: from here on the process belongs to the program, and so does its word. */
static PyObject *py_begin(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    own_progress->ready_ns = now_ns();
    if (munmap(house.progress, sizeof(struct progress) * MAX_SLOTS))
        _exit(EXIT_NOT_CONFINED);
    Py_RETURN_NONE;
}

/* What the program says of itself, laid out as page.py reads it. */
static PyObject *py_say_completed(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    own_page[0] = 1;
    Py_RETURN_NONE;
}

static PyObject *py_say_value(PyObject *self, PyObject *value) {
    (void)self;
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(value, &data, &size))
        return NULL;
    uint64_t kept = (uint64_t)size < PAGE_BYTES - VALUE_AT ? (uint64_t)size : PAGE_BYTES - VALUE_AT, length = kept + 1;
    memcpy(own_page + VALUE_AT, data, kept);
    memcpy(own_page + VALUE_LENGTH_AT, &length, sizeof length);
    Py_RETURN_NONE;
}

static PyObject *py_write_file(PyObject *self, PyObject *args) {
    (void)self;
    const char *path, *data;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "sy#", &path, &data, &size))
        return NULL;
    if (write_new_file(path, data, size))
        return fail(path);
    Py_RETURN_NONE;
}

/* In a session, which has one thread: 0 in the fork. */
static PyObject *py_fork_beside(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyOS_BeforeFork();
    pid_t pid = fork_beside();
    int error = errno;
    if (pid == 0)
        PyOS_AfterFork_Child();
    else
        PyOS_AfterFork_Parent();
    errno = error;
    return pid < 0 ? fail("clone") : PyLong_FromLong(pid);
}

#define MESSAGE_BYTES 65536
#define MESSAGE_FDS 160

static PyObject *fd_list(struct msghdr *message) {
    PyObject *list = PyList_New(0);
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); list && c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
            if (fd < FIRST_FREE_FD) { /* a cell has closed one of the numbers that mean something */
                int low = fd;
                fd = fcntl(low, F_DUPFD_CLOEXEC, FIRST_FREE_FD);
                close(low);
            }
            PyObject *number = PyLong_FromLong(fd);
            if (!number || PyList_Append(list, number))
                Py_CLEAR(list);
            Py_XDECREF(number);
            if (!list)
                break;
        }
    }
    return list;
}

/* In a session: the next message of its worker and the descriptors that came with it; no bytes when the worker is gone. In C
 * because the module `socket` is not loaded in every zygote. */
static PyObject *py_receive(PyObject *self, PyObject *args) {
    (void)self;
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * MESSAGE_FDS)];
    } control;
    PyObject *data = PyBytes_FromStringAndSize(NULL, MESSAGE_BYTES);
    if (!data)
        return NULL;
    struct iovec space = {PyBytes_AS_STRING(data), MESSAGE_BYTES};
    struct msghdr message;
    ssize_t n;
    do {
        message = (struct msghdr){.msg_iov = &space, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        Py_BEGIN_ALLOW_THREADS;
        n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        Py_END_ALLOW_THREADS;
    } while (n < 0 && errno == EINTR && !PyErr_CheckSignals());
    if (n < 0) {
        Py_DECREF(data);
        return PyErr_Occurred() ? NULL : fail("recvmsg");
    }
    PyObject *fds = fd_list(&message);
    if (!fds || _PyBytes_Resize(&data, n)) {
        Py_XDECREF(fds);
        return NULL;
    }
    return Py_BuildValue("NN", data, fds);
}

/* A session lives long: what its children leave behind becomes its own, and what it frees is given back, unlike in the zygote
 * (jail.py) and in programs, which are over before that would pay. */
static PyObject *py_settle_down(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        return fail("PR_SET_CHILD_SUBREAPER");
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    mallopt(M_TRIM_THRESHOLD, 4 << 20);
    Py_RETURN_NONE;
}

static PyObject *py_steps(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *names = PyTuple_New(step_count());
    for (int i = 0; names && i < step_count(); i++)
        PyTuple_SET_ITEM(names, i, PyUnicode_FromString(step_name(i)));
    return names;
}

static PyObject *py_landlock_abi(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromLong(landlock_abi());
}

/* For good, for this process and all that it forks: what an executed file could give, and these of its own. False: it may not. */
static PyObject *py_give_up_capabilities(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long given_up;
    if (!PyArg_ParseTuple(args, "K", &given_up))
        return NULL;
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2];
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) || syscall(SYS_capget, &header, sets))
        return fail("capget");
    for (int capability = 0, is_bounded; (is_bounded = prctl(PR_CAPBSET_READ, capability, 0, 0, 0)) >= 0; capability++)
        if (is_bounded && prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
            Py_RETURN_FALSE; /* without CAP_SETPCAP: no_new_privs has to do */
    for (int i = 0; i < 2; i++) {
        unsigned kept = ~(unsigned)(given_up >> 32 * i);
        sets[i].effective &= kept, sets[i].permitted &= kept, sets[i].inheritable = 0;
    }
    if (syscall(SYS_capset, &header, sets))
        return fail("capset");
    Py_RETURN_TRUE;
}

static PyObject *py_use_huge_pages(PyObject *self, PyObject *args) {
    (void)self;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "n", &most))
        return NULL;
    if (heap_init((size_t)most))
        return fail("mmap");
    Py_RETURN_NONE;
}

static PyObject *py_forbid_dumps(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    if (prctl(PR_SET_DUMPABLE, 0))
        return fail("PR_SET_DUMPABLE");
    Py_RETURN_NONE;
}

static PyObject *py_remove_folder(PyObject *self, PyObject *args) {
    (void)self;
    const char *path;
    if (!PyArg_ParseTuple(args, "s", &path))
        return NULL;
    if (remove_folder(path))
        return fail(path);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"serve", py_serve, METH_VARARGS, "Fork programs; returns in a child: plain code, or the bytes of a payload."},
    {"begin", py_begin, METH_NOARGS, "Mark the program as started, and give up the means to say so."},
    {"say_completed", py_say_completed, METH_NOARGS, "The program's last line was reached."},
    {"say_value", py_say_value, METH_O, "The bytes of its value, cut to what fits."},
    {"write_file", py_write_file, METH_VARARGS, "Write a new file."},
    {"fork_beside", py_fork_beside, METH_NOARGS, "In a session: fork a sibling of this process; 0 in it."},
    {"receive", py_receive, METH_VARARGS, "In a session: the next message of its worker, and its descriptors."},
    {"settle_down", py_settle_down, METH_NOARGS, "In a session: adopt orphans, give back memory."},
    {"steps", py_steps, METH_NOARGS, "The names of the child's set-up steps, in order."},
    {"landlock_abi", py_landlock_abi, METH_NOARGS, "The kernel's Landlock ABI, or -1."},
    {"give_up_capabilities", py_give_up_capabilities, METH_VARARGS, "Empty the bounding set and give up these, a bit for each."},
    {"use_huge_pages", py_use_huge_pages, METH_VARARGS, "Put Python's objects on huge pages, up to so many bytes, until `serve`."},
    {"remove_folder", py_remove_folder, METH_VARARGS, "Remove a folder, if it is there, and all below it; follows no link."},
    {"forbid_dumps", py_forbid_dumps, METH_NOARGS, "Keep /proc/PID of this process to root."},
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
    PyModule_AddIntConstant(module, "LAYER_PIDNS", LAYER_PIDNS);
    PyModule_AddIntConstant(module, "LAYER_MOUNTS", LAYER_MOUNTS);
    PyModule_AddIntConstant(module, "LAYER_UID", LAYER_UID);
    PyModule_AddIntConstant(module, "LAYER_CGROUP", LAYER_CGROUP);
    PyModule_AddIntConstant(module, "LAYER_LANDLOCK", LAYER_LANDLOCK);
    PyModule_AddIntConstant(module, "LAYER_SECCOMP", LAYER_SECCOMP);
    PyModule_AddIntConstant(module, "CONTROL_FD", CHILD_FD_CONTROL);
    return module;
}
