# A 13: thirty busy processes in one slot
# expect: status=timeout blame=model
# limits: wall_s=1 processes=32
import os

for _ in range(29):
    if os.fork() == 0:
        break
while True:
    pass
