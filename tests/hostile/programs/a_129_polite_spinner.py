# A 129: main sleeps while one polite thread of its own starves behind the others
# expect: status=timeout blame=model
# limits: wall_s=1 cpu_s=60
import os
import time

for number in range(3 * len(os.sched_getaffinity(0))):
    if os.fork() == 0:
        if number == 0:
            os.nice(19)
        while True:
            pass
time.sleep(3)
print("escaped: it slept for longer than its time")
