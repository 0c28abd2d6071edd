# F 72: holds a lock on a file that every program can read
# expect: status=ok
import fcntl
import os
import time

with open(os.__file__) as shared:
    fcntl.flock(shared, fcntl.LOCK_SH)
    time.sleep(3)
print("contained")
