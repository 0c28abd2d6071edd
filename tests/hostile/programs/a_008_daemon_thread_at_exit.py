# A 8: a daemon thread spins at the end, and nobody waits for it
# expect: status=ok max_wall_s=2
import threading


def spin():
    while True:
        pass


threading.Thread(target=spin, daemon=True).start()
print("contained")
