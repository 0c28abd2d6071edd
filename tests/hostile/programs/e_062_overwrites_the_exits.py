# E 62: overwrites everything that could take part in its end
# expect: status=error exit=7 blame=model completed=no stdout="before\n"
import atexit
import os
import sys
import threading

print("before")
leave = os._exit


def forge(*_):
    leave(0)


os._exit = sys.exit = threading._shutdown = atexit._run_exitfuncs = lambda *_: None
sys.stdout = sys.stderr = sys.__stdout__ = None
for name in list(sys.modules):
    if name not in ("sys", "builtins", "__main__"):
        sys.modules[name] = None
sys.modules.pop("__main__")
raise SystemExit(7)
