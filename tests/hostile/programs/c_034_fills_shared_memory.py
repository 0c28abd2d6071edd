# C 34: /dev/shm until it is full; without a mount namespace there is none
# expect: status=ok
written = 0
try:
    for number in range(16):
        with open(f"/dev/shm/file{number}", "wb") as file:
            written += file.write(bytes(4 << 20))
except OSError:
    print("contained" if written <= 16 << 20 else f"escaped: {written} bytes")
else:
    print(f"escaped: {written} bytes")
