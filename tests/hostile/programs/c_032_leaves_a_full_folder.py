# C 32: leaves 60 MB in files
# expect: status=ok
# limits: file_mb=64
try:
    for number in range(15):
        with open(f"file{number}", "wb") as file:
            file.write(bytes(4 << 20))
except OSError:
    pass
print("contained")
