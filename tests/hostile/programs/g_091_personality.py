# G 91: another personality: addresses that are not random, pages that are executable when read
# expect: status=ok
# needs: seccomp x86_64
from attack import attempt, syscall, tell

for persona in 0x0040000, 0x0400000, 0x0100000, 0x0000008, 0xFFFFFFFF:
    attempt(hex(persona), syscall, 135, persona)
tell()
