# K 128: twenty threads without the interpreter's lock, so that main waits behind its own
# expect: status=timeout blame=model
# tier-CD: status=timeout|error
# limits: wall_s=1 cpu_s=60 memory_mb=256
import hashlib
import os
import threading
import time

block = bytes(1 << 25)


def work():
    while time.process_time() < 3 * len(os.sched_getaffinity(0)):
        hashlib.sha256(block)


threads = [threading.Thread(target=work) for _ in range(20)]
for thread in threads:
    thread.start()
work()
for thread in threads:
    thread.join()
print("escaped: it had three times its time")
