# C 35: a write beyond the largest file is an error and not the end
# expect: status=ok
from attack import attempt, tell

with open("large", "wb", buffering=0) as file:
    file.seek(300 << 20)
    attempt("300 MB", file.write, b"x")
tell()
