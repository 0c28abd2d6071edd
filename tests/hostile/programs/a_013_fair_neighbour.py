# A 13: what is left of the CPU beside a program with thirty busy processes
# expect: status=ok
# needs: cpu_shares
# pair: a_013_thirty_spinners.py
import time

began, used = time.monotonic(), time.process_time()
while time.monotonic() - began < 0.8:
    pass
share = (time.process_time() - used) / (time.monotonic() - began)
# Two cores: by slot it gets 0.5 to 1 of one (a fifth beside four such pairs), by process 0.06 (0.016).
print("contained" if share > 0.04 else f"escaped: only {share:.3f} of a core was left")
