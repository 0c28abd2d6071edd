# K 113: uses up what the kernel counts by uid (watches, pending signals, pipes' pages) and not by program
# expect: status=ok
import os
import select
import signal
import time

held = []
poll = select.epoll()
try:
    while len(held) < 5000:
        read, write = os.pipe()
        held.append(read)
        poll.register(read, select.EPOLLIN)
        poll.register(write, select.EPOLLOUT)
except OSError:
    pass
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
for _ in range(2000):
    try:
        os.kill(os.getpid(), signal.SIGRTMIN)
    except OSError:
        break
time.sleep(0.1)
print("contained")
