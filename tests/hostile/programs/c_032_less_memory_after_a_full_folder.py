# C 32: what the call before it left in files does not count as its own memory
# expect: status=ok
# limits: memory_mb=32
# after: c_032_leaves_a_full_folder.py
held = bytearray(8 << 20)
print("contained")
