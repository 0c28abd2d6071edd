# C 37: pipes, filled to the brim, until there are no descriptors left
# expect: status=ok
import os

full = 0
try:
    while full < 1000:
        _, write = os.pipe()
        os.set_blocking(write, False)
        try:
            while True:
                os.write(write, bytes(65536))
        except BlockingIOError:
            full += 1
except OSError:
    pass
print("contained" if full <= 128 else f"escaped: {full} pipes")
