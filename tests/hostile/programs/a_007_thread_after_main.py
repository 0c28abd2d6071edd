# A 7: a thread that is no daemon prints after the main program's end, and is heard
# expect: status=ok stdout="main\nlate\n"
# expect-cell: stdout="main\n"
import threading
import time


def late():
    time.sleep(0.2)
    print("late")


threading.Thread(target=late).start()
print("main")
