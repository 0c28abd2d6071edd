# K 110: hundreds of siblings that end at once, with exit codes that the zygote could take for the program's
# expect: status=error exit=5 blame=model
# needs: x86_64
from attack import syscall

for _ in range(300):
    try:
        if syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0:
            syscall(231, 0)
    except OSError:
        pass
raise SystemExit(5)
