# K 125: one with large limits in the same slot, forked from another zygote
# expect: status=ok
# limits: memory_mb=512 processes=64
# after: k_125_small_limit.py
import numpy

numpy.zeros(10)
print("contained")
