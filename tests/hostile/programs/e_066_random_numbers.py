# E 66: two programs have the same random numbers
# expect: status=ok differs=yes
import random
import uuid

import numpy

print(random.random(), uuid.uuid4())
print(numpy.random.rand(), numpy.random.default_rng().random())
