/* Requests to a zygote and its reports, over one SOCK_SEQPACKET socket; the runner sends first, then the worker. Fixed
 * structs of 64-bit integers; `worker/sandbox/protocol.py` has the same lists. They never contain a byte of the caller's
 * data: that travels in descriptors that only the confined child reads. */
#pragma once
#include <stdint.h>

enum { REQUEST_SLOT = 1, REQUEST_RUN = 2, REQUEST_KILL = 3, REQUEST_PING = 4, REQUEST_MEMBER = 5, REQUEST_INTERRUPT = 6,
       REQUEST_END_MEMBER = 7, REQUEST_USAGE = 8, REQUEST_PROCESSES = 9 };
enum { REPORT_READY = 1, REPORT_ENDED = 2, REPORT_PONG = 3, REPORT_MEMBER = 4, REPORT_MEMBER_ENDED = 5, REPORT_USAGE = 6 };
enum { BY_ITSELF = 0, BY_WALL = 1, BY_OUTPUT = 2, BY_REQUEST = 3, BY_MEMORY = 4, BY_DEADLINE = 5 };

/* The descriptors of REQUEST_RUN, in order; from FD_STDIN on only if `flags` has their bit: stdin, the socket for the folder
 * (to fetch files), the compiled program, the control socket of a session. The payload follows the page in the same file. */
enum { FD_STDOUT, FD_STDERR, FD_PAGE, FD_STDIN, FD_FOLDER_SOCKET, FD_BINARY, FD_CONTROL, RUN_FDS };
enum { HAS_STDIN = 1, HAS_FOLDER_SOCKET = 2, HAS_BINARY = 4, HAS_CONTROL = 8 };

/* The descriptors of REQUEST_MEMBER, in order, each only if `flags` has its bit: the socket with a fork's hello (without it
 * the request is about the session's first process), and of its own control group (leaf) the list of processes, the file
 * that kills them, the CPU time, and the list of threads. */
enum { LEAF_PROCESSES, LEAF_KILL, LEAF_USAGE, LEAF_THREADS, LEAF_FDS };
enum { HAS_HELLO = 1, HAS_LEAF = 2, LEAF_BY_PIDS = 4 /* version 1: the second file is a process limit */,
       LEAF_JOINED = 8 /* it moved there itself; the zygote checks that */ };

/* REQUEST_USAGE: a cell begins. */
enum { USAGE_BEGIN = 1 };

/* REQUEST_SLOT registers a slot. The runner sends it for each slot when it starts the zygote; the worker sends it for the
 * slot of a session, with descriptors from the runner. `wall_ns` is the slot's uid, refused outside the zygote's range;
 * `cpu_s` has a bit for each descriptor that is present. The descriptors, in order, all opened by the runner: the slot's
 * cgroup files. */
enum { CG_MEMORY_LIMIT, CG_MEMORY_PEAK, CG_MEMORY_EVENTS, CG_PIDS_LIMIT, CG_PIDS_NOW, CG_CPU_USAGE, CG_THREADS, CG_ATTACH,
       MAX_CG_ATTACH = 4,
       SLOT_FDS = CG_ATTACH + MAX_CG_ATTACH };

struct request {
    int64_t kind, slot, call;
    int64_t wall_ns, deadline_ns; /* the limit without the time that it starved, and including it */
    int64_t cpu_s, memory_bytes, file_bytes, folder_bytes, output_bytes, processes, open_files;
    int64_t flags;
    int64_t fail_step; /* test hook: this step fails, if the zygote was started with fault injection */
    int64_t member;    /* of a session: the number of the process */
};

enum { OOM_BY_UNKNOWN, OOM_BY_LIMIT, OOM_BY_MACHINE };

struct report {
    int64_t kind, slot, call;     /* from REPORT_MEMBER on, `call` is the member */
    int64_t step, error;          /* the set-up step that failed (1-based) and its errno; 0 if the program was started */
    int64_t status, ended_by;     /* as from wait4 */
    int64_t start_ns, run_ns;     /* from fork to the program's first byte; from there to the end of the main process */
    int64_t cpu_ns, memory_peak, oom_kills, processes_peak;
    int64_t starved_ns;           /* runnable without a CPU (cpu_meter.c); of a session, in this cell */
    int64_t oom_by;               /* the cause of `oom_kills`, if there are any */
};
