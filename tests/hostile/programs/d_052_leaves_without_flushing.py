# D 52: what is still in a buffer of its own when it leaves is lost, what was printed is not
# expect: status=ok stdout="printed\n" completed=no
import os

buffered = os.fdopen(1, "w", buffering=65536)
buffered.write("lost")
print("printed")
os._exit(0)
