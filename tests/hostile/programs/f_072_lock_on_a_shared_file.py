# F 72: sees a sibling's lock on a shared file: a covert bit, known and written down (docs/security.md, residual risks)
# expect: status=ok stdout="a bit of a sibling's\n"
# pair: f_072_lock_holder.py
import fcntl
import os
import time

with open(os.__file__) as shared:
    for _ in range(200):
        try:
            fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(shared, fcntl.LOCK_UN)
        except BlockingIOError:
            print("a bit of a sibling's")
            break
        time.sleep(0.02)
    else:
        print("contained")
