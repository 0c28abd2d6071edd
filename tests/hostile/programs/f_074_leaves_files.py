# F 74: leaves files wherever it can, some of them locked
# expect: status=ok
import os

for folder in "/tmp", "/dev/shm", "/mnt", "/var/tmp", "/w/call", ".", "..":
    try:
        with open(f"{folder}/left74", "w") as file:
            file.write("left")
        os.makedirs(f"{folder}/locked74/below/.hidden")
        os.symlink("/etc", f"{folder}/link74")
        os.mkfifo(f"{folder}/pipe74")
        os.chmod(f"{folder}/locked74/below", 0)
        os.chmod(f"{folder}/locked74", 0)
    except OSError:
        pass
os.environ["LEFT74"] = "1"
print("contained")
