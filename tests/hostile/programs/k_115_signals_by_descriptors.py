# K 115: has the kernel send signals for it: the owner of a descriptor, a timer, a process's handle
# expect: status=ok
# bait
# needs: landlock|pidns x86_64
import fcntl
import os
import signal
import time

from attack import attempt, syscall, tell

F_SETSIG = 10
for pid in {int(os.environ["BAIT_PID"]), os.getppid()} - {0, os.getpid()}:
    attempt(f"kill {pid}", os.kill, pid, 0)
    attempt(f"pidfd {pid}", lambda p: signal.pidfd_send_signal(os.pidfd_open(p), 0), pid)
    attempt(f"sigqueue {pid}", syscall, 129, pid, signal.SIGCONT, bytes(128))
    attempt(f"tgkill {pid}", syscall, 234, pid, pid, 0)
    read, write = os.pipe()
    try:
        fcntl.fcntl(read, fcntl.F_SETOWN, pid)
        fcntl.fcntl(read, F_SETSIG, signal.SIGURG)  # which nobody minds
        fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
        os.write(write, b"x")
    except OSError:
        pass
time.sleep(0.05)
tell()
