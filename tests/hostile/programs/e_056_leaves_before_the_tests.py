# E 56: leaves with exit code 0 before what follows it can run
# expect: status=ok completed=no stdout="solution\n"
import os

print("solution")
os._exit(0)
print("tests passed")
