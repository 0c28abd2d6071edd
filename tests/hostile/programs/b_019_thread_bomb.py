# B 19: starts threads until it may not any more
# expect: status=ok
import threading
import time

started = 0
try:
    while started < 2000:
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
print("contained" if started <= 32 else f"escaped: {started} threads")
