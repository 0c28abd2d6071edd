/* What a zygote is told over its one SOCK_SEQPACKET socket, by the runner first and then by the worker, and what it answers.
 * Fixed structs of 64-bit integers; `worker/sandbox/protocol.py` holds the same lists. No payload byte is ever in them:
 * what belongs to the caller travels as descriptors that only the confined child reads. */
#ifndef PROTOCOL_H
#define PROTOCOL_H
#include <stdint.h>

enum { ASK_SLOT = 1, ASK_RUN = 2, ASK_KILL = 3, ASK_PING = 4, ASK_MEMBER = 5, ASK_INTERRUPT = 6, ASK_END_MEMBER = 7, ASK_USAGE = 8,
       ASK_PROCESSES = 9 };
enum { SAY_READY = 1, SAY_ENDED = 2, SAY_PONG = 3, SAY_MEMBER = 4, SAY_MEMBER_ENDED = 5, SAY_USAGE = 6 };
enum { BY_ITSELF = 0, BY_WALL = 1, BY_OUTPUT = 2, BY_REQUEST = 3, BY_MEMORY = 4, BY_DEADLINE = 5 };

/* The descriptors of ASK_RUN, in order; from FD_STDIN on only if `flags` says so: where there is something to read, where files are
 * fetched, where a compiled program is started, and for a session, where its cells come from. The payload lies behind the page. */
enum { FD_STDOUT, FD_STDERR, FD_PAGE, FD_STDIN, FD_FOLDER_SOCKET, FD_BINARY, FD_CONTROL, RUN_FDS };
enum { HAS_STDIN = 1, HAS_FOLDER_SOCKET = 2, HAS_BINARY = 4, HAS_CONTROL = 8 };

/* The descriptors of ASK_MEMBER, in order, each only if `flags` says so: where a fork said hello (without it the session's first
 * process is meant), and of its own control group the list of processes, the file that kills them, the CPU time, and the list of
 * threads. */
enum { LEAF_FDS = 4 };
enum { HAS_HELLO = 1, HAS_LEAF = 2, LEAF_BY_PIDS = 4 /* version 1: its file is a limit of processes */,
       LEAF_JOINED = 8 /* it has moved there itself, which is to be checked */ };

/* ASK_USAGE: a cell begins now. */
enum { USAGE_BEGIN = 1 };

/* ASK_SLOT tells a zygote of a slot. The runner sends it for each slot when it starts the zygote; the worker sends it for the place
 * of a session, with what the runner made for that. `wall_ns` is the slot's uid, refused if it is not one of the zygote's; `cpu_s` has
 * a bit for each descriptor that is there. The descriptors, in order, all opened by the runner: the slot's cgroup files. */
enum { CG_MEMORY_LIMIT, CG_MEMORY_PEAK, CG_MEMORY_EVENTS, CG_PIDS_LIMIT, CG_PIDS_NOW, CG_CPU_USAGE, CG_THREADS, CG_ATTACH,
       CG_ATTACH_MOST = 4,
       SLOT_FDS = CG_ATTACH + CG_ATTACH_MOST };

struct ask {
    int64_t kind, slot, call;
    int64_t wall_ns, deadline_ns; /* how long it may run, not counting the time that it starved; and counting everything */
    int64_t cpu_s, memory_bytes, file_bytes, folder_bytes, output_bytes, processes, open_files;
    int64_t flags;
    int64_t fail_step; /* test hook: the step that is to fail, honoured only by a zygote that was started for it */
    int64_t member;    /* of a session: which of its processes */
};

enum { OOM_BY_UNKNOWN, OOM_BY_LIMIT, OOM_BY_MACHINE };

struct say {
    int64_t kind, slot, call;     /* of SAY_MEMBER and what follows it, `call` is the member */
    int64_t step, error;          /* the set-up step that failed (1-based) and its errno; 0 if the program was started */
    int64_t status, ended_by;     /* as from wait4 */
    int64_t start_ns, run_ns;     /* fork to first user byte; from there to the end of the main process */
    int64_t cpu_ns, memory_peak, oom_kills, processes_peak;
    int64_t starved_ns;           /* how long it wanted a CPU while others had it (cpu_meter.h); of a session, in this cell */
    int64_t oom_by;               /* of `oom_kills`, if there are any */
};
#endif
