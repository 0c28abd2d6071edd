# F 73: opens the named memory and semaphore of the call before it
# expect: status=ok
# after: f_073_leaves_named_memory.py
from multiprocessing import shared_memory

from attack import attempt, libc, tell

for name in "left73", "sem.left73", "psm_left73":
    attempt(name, open, f"/dev/shm/{name}")
for name in "left73", "left73-too", "psm_left73":
    attempt(name, shared_memory.SharedMemory, name)
if libc.sem_open(b"/left73", 0) != 0:
    attempt("sem_open", lambda: None)
tell()
