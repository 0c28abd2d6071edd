# K 143: floods the socket on which a session answers its worker with JSON that is nested as deep as fits
# expect: status=ok
# expect-cell: status=signal signal=9 blame=model
import os

CONTROL_FD = 6
for _ in range(100_000):
    try:
        os.write(CONTROL_FD, b"[" * 4000)
    except OSError:
        break
print("contained")
