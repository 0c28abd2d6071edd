#!/bin/sh
# Prints the Python that runs programs fastest, of those on this machine that can run the service; `python3` if there is no faster one.
# docs/performance.md has the figures behind the order.
for version in 3.13 3.12; do
    for python in "$(command -v python$version)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/$version*/bin/python$version; do
        "$python" -Ic 'if True:
            import ctypes, ensurepip, os, ssl, sys, sysconfig, venv
            header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
            sys.exit(not os.path.isfile(header) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
        ' >/dev/null 2>&1 || continue
        printf '%s\n' "$python"
        exit
    done
done
echo python3
