# F 71: watches the libraries that others load
# expect: status=ok
# needs: seccomp x86_64
from attack import attempt, buffer, syscall, tell

attempt("inotify_init", syscall, 253)
attempt("inotify_init1", syscall, 294, 0)
attempt("fanotify_init", syscall, 300, 0, 0)
attempt("F_NOTIFY", syscall, 72, 0, 1026, 1)
attempt("name_to_handle_at", syscall, 303, -100, b"/usr", buffer(), buffer(8), 0)
tell()
