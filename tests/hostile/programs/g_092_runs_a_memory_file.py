# G 92: runs a program from a file without a name; it is as confined as any other
# expect: status=ok
# needs: landlock|mntns
import os
import shutil

try:
    fd = os.memfd_create("program")
except OSError:
    print("contained")
    raise SystemExit
with open(shutil.which("cat"), "rb") as cat:
    os.write(fd, cat.read())
for file in "/etc/shadow", "/etc/passwd", "/root/.bashrc":
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.close(2)
        try:
            os.execve(fd, ["cat", file], {})
        finally:
            os._exit(99)
    os.close(write)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0 or os.read(read, 1):
        print(f"escaped: {file}")
print("contained")
