# K 123: reads whole libraries, so that their pages are counted as its own
# expect: status=ok
# limits: memory_mb=32 wall_s=10
import os

read = 0
for folder, _, names in os.walk("/usr/lib"):
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                read += len(file.read(4 << 20))
        except OSError:
            pass
    if read > 100 << 20:
        break
print("contained")
