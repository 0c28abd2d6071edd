# E 57: the same in a polite way
# expect: status=ok completed=no stdout="solution\n"
import sys

print("solution")
sys.exit(0)
print("tests passed")
