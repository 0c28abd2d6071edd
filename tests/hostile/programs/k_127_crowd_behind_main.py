# K 127: ten processes that are nobody's children take the CPU from main, which waits for them and calls that starving
# expect: status=timeout blame=model
# tier-CD: status=timeout|error
# limits: wall_s=1
import os
import time

need_s = 3 * len(os.sched_getaffinity(0)) / 10


def work(number):
    while time.process_time() < need_s:
        pass
    with open(f"done{number}", "w"):
        pass


for number in range(10):
    if os.fork() == 0:
        if os.fork() == 0:
            work(number)
        os._exit(0)
    os.wait()
while sum(name.startswith("done") for name in os.listdir()) < 10:
    pass
print("escaped: it had three times its time")
