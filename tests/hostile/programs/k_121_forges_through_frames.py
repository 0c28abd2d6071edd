# K 121: writes through every object of ours that its frames lead to
# expect: status=signal signal=6 blame=model
import os
import sys

frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, memoryview) and not value.readonly:
            value[: len(value)] = b"\x01" * len(value)
    frame = frame.f_back
os.abort()
