# F 73: leaves named memory and a named semaphore
# expect: status=ok
import os

for name in "left73", "sem.left73", "psm_left73":
    try:
        with open(f"/dev/shm/{name}", "w") as file:
            file.write("left")
    except OSError:
        pass
try:
    from multiprocessing import resource_tracker, shared_memory

    resource_tracker.register = lambda *_: None
    shared_memory.SharedMemory("left73-too", create=True, size=100)
except OSError:
    pass
os.write(1, b"contained\n")
os._exit(0)
