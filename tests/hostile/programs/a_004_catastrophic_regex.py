# A 4: a regular expression with exponential backtracking
# expect: status=timeout
# limits: wall_s=0.5
import re

re.match(r"(a+)+$", "a" * 60 + "b")
