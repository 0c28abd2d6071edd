# C 29: an array of 8 GB
# expect: status=memory_limit|error blame=model
# limits: wall_s=10
import numpy

numpy.ones(1 << 30)
