# B 26: recursion in C until the stack is used up
# expect: status=signal signal=11 blame=model
# limits: wall_s=60 cpu_s=60
import sys

sys.setrecursionlimit(1 << 30)
nested = []
for _ in range(300_000):
    nested = [nested]
repr(nested)
