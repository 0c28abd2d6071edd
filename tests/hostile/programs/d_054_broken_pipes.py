# D 54: writes to pipes that nobody reads
# expect: status=ok
import os
import subprocess

read, write = os.pipe()
os.close(read)
try:
    os.write(write, b"x")
    print("escaped: a pipe without a reader took it")
except BrokenPipeError:
    pass
line = subprocess.run("yes | head -1", shell=True, capture_output=True).stdout
print("contained" if line == b"y\n" else line)
