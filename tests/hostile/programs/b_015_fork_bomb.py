# B 15: the classic fork bomb
# expect: status=timeout
# limits: wall_s=0.5
import os

while True:
    try:
        os.fork()
    except OSError:
        pass
