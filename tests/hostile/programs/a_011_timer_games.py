# A 11: turns off every timer it can find and blocks every signal; the clock that counts is not in here
# expect: status=timeout
# limits: wall_s=0.5
import signal

signal.alarm(0)
for timer in signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF:
    signal.setitimer(timer, 0)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True:
    pass
