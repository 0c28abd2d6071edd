# A 14: an alarm without a handler ends it as it would anywhere
# expect: status=signal signal=14 blame=model
import signal
import time

signal.setitimer(signal.ITIMER_REAL, 0.05)
time.sleep(10)
