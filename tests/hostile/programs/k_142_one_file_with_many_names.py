# K 142: one file is to be fetched under many names, so that the result is many times what it took to make
# expect: status=ok files=a,b
# fetch: a b c d e f g h i j k l m n o p q r s t u v w x y z
# limits: file_mb=64 memory_mb=128
import os

with open("a", "wb") as file:
    file.write(os.urandom(10 << 20))
for name in "bcdefghijklmnopqrstuvwxyz":
    os.link("a", name)
print("contained")
