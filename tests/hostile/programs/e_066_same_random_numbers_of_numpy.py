# E 66: the same, for numpy's global generator alone
# expect: status=ok differs=yes
import numpy

print(numpy.random.rand())
