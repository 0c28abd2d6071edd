# C 36: a file of a terabyte that takes no space
# expect: status=ok files=sparse
# fetch: sparse
import os

from attack import attempt, tell

with open("sparse", "wb") as file:
    attempt("1 TB", os.truncate, file.fileno(), 1 << 40)
    attempt("fallocate", os.posix_fallocate, file.fileno(), 0, 1 << 40)
tell()
