# K 125: a program with a small limit of memory and processes
# expect: status=ok
# limits: memory_mb=64 processes=8
print("contained")
