# F 70: memory, semaphores and messages by number, which other programs could know too
# expect: status=ok
# needs: seccomp x86_64
from attack import attempt, syscall, tell

attempt("shmget", syscall, 29, 70, 4096, 0o1666)
attempt("semget", syscall, 64, 70, 1, 0o1666)
attempt("msgget", syscall, 68, 70, 0o1666)
attempt("mq_open", syscall, 240, b"/seventy", 0o102, 0o666, None)
tell()
