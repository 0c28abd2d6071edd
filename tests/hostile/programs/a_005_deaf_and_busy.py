# A 5: ignores every signal that can be ignored, and spins in five threads
# expect: status=timeout
# expect-cell: status=ok|timeout stdout=""
# limits: wall_s=0.5
import signal
import threading

for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
    signal.signal(number, signal.SIG_IGN)


def spin():
    while True:
        pass


for _ in range(5):
    threading.Thread(target=spin).start()
