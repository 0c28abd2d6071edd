# K 112: makes its stdout enormous without writing
# expect: status=output_limit blame=model
# limits: output_kb=16
import os
import time

os.ftruncate(1, 8 << 20)
time.sleep(10)
