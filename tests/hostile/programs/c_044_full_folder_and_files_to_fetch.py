# C 44: its folder is full when its files are collected
# expect: status=ok files=small
# fetch: small large missing
with open("small", "w") as file:
    file.write("small")
try:
    with open("large", "wb", buffering=0) as file:
        for _ in range(20):
            file.write(bytes(1 << 20))
except OSError:
    pass
with open("large", "ab", buffering=0) as file:
    try:
        file.truncate(16 << 20)
    except OSError:
        pass
print("contained")
