# E 64: sleeps while its objects are taken down
# expect: status=timeout blame=model stdout="main\n"
# expect-cell: status=ok blame=none
# limits: wall_s=0.5
import time


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(100)


slow = Slow()
print("main")
