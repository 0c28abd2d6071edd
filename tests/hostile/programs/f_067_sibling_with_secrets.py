# F 67: a program with secrets in its environment, memory, descriptors and files, some of them in a command that it started
# expect: status=ok
# env: SECRET=of-a-sibling
import subprocess
import time

with open("secret", "w") as file:
    file.write("of a sibling")
    process = subprocess.Popen(["sleep", "1"], stdin=open("secret"))
    time.sleep(0.8)
process.wait()
print("contained")
