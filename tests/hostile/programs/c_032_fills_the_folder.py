# C 32: files until the folder is full; without a file system of its own only each file is bounded
# expect: status=ok
# without mntns: stdout_has=""
written = 0
try:
    for number in range(16):
        with open(f"file{number}", "wb") as file:
            written += file.write(bytes(4 << 20))
except OSError:
    print("contained" if written <= 16 << 20 else f"escaped: {written} bytes")
else:
    print(f"{written >> 20} MB in files")
