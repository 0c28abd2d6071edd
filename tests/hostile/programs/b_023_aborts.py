# B 23: aborts
# expect: status=signal signal=6 blame=model
import os

os.abort()
