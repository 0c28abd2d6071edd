# G 96: crashes as often as it can; none leaves a core or starts a helper of the host's
# expect: status=ok
import ctypes
import os

dumped = 0
for _ in range(200):
    child = os.fork()
    if child == 0:
        ctypes.string_at(0)
    dumped += os.WCOREDUMP(os.waitpid(child, 0)[1])
found = [name for name in os.listdir(".") if name.startswith("core")]
print(f"escaped: {dumped} cores, {found}" if dumped or found else "contained")
