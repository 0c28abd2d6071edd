# K 141: a file of 400 MB that takes no space is to be fetched
# expect: status=ok files=small
# fetch: sparse small
# limits: file_mb=500 memory_mb=128
import os

with open("sparse", "wb") as file:
    os.truncate(file.fileno(), 400 << 20)
with open("small", "w") as file:
    file.write("small")
print("contained")
