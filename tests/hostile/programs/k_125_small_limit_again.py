# K 125: the small limit again holds, although its zygote has set it before and another one changed it since
# expect: status=memory_limit blame=model
# without cgroup: status=memory_limit|error
# limits: memory_mb=64 processes=8
# after: k_125_large_limit_in_another_zygote.py
held = bytearray(300 << 20)
print("escaped: 300 MB")
