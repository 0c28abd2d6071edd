# A 2: sleeps for thirty years
# expect: status=timeout blame=model
# limits: wall_s=0.5
import time

time.sleep(1e9)
