# C 40: recursion without a limit
# expect: status=memory_limit|timeout|signal|error
# limits: wall_s=2
import sys

sys.setrecursionlimit(1 << 30)


def deeper():
    deeper()


deeper()
