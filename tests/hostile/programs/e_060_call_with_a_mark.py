# E 60: an earlier call that leaves marks all over its memory
# expect: status=ok
# stdin: MEMORY-MARK-60
# env: MARK=MEMORY-MARK-60
import sys

held = ["MEMORY-MARK-60 %d" % number for number in range(5000)]
raw = bytearray(b"MEMORY-MARK-60" * 5000)
text = sys.stdin.read() * 1000
print("contained")
