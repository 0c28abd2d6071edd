# E 63: what a child prints after the main process ended is not there
# expect: status=ok stdout="main\n"
import os
import time

if os.fork() == 0:
    time.sleep(0.3)
    os.write(1, b"escaped: late words\n")
    os._exit(0)
print("main")
