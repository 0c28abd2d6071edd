# K 129: each process works for 20 ms and hands on to the next, so that nobody sees who used the CPU
# expect: status=timeout blame=model
# expect-cell: status=timeout|error
# tier-CD: status=timeout|error
# limits: wall_s=1
import os
import time


def relay():
    """Never more than a few alive, each an orphan."""
    while True:
        began = time.process_time()
        while time.process_time() < began + 0.02:
            pass
        if os.fork():
            os._exit(0)


for _ in range(2 * len(os.sched_getaffinity(0))):
    if os.fork() == 0:
        if os.fork() == 0:
            relay()
        os._exit(0)
    os.wait()
began = time.process_time()
while time.process_time() < began + 0.98:
    pass
time.sleep(60)
