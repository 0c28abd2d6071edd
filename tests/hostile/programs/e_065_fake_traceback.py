# E 65: a traceback on stderr is only text
# expect: status=ok exit=0 stderr_has=MemoryError
import sys

print('Traceback (most recent call last):\n  File "/main.py", line 1\nMemoryError', file=sys.stderr)
print("contained")
