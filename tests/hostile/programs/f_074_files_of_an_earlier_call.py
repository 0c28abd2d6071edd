# F 74: looks for the files of the call before it
# expect: status=ok
# after: f_074_leaves_files.py
import os

found = [name for name in os.environ if "LEFT74" in name]
for folder in "/tmp", "/dev/shm", "/mnt", "/var/tmp", "/w/call", ".", "..":
    try:
        found += [f"{folder}/{name}" for name in os.listdir(folder) if "74" in name]
    except OSError:
        pass
print(f"escaped: {found}" if found else "contained")
