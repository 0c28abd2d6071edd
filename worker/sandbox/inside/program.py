"""Runs one program in the confined child, as `python /main.py` would, and exits.

Functions that decide how the process ends are bound to names of this module, which no program can import: a program that
overwrites `os._exit` or `sys.excepthook` does not change them.

The kernel copies every page that a child writes to, and Python writes to every object that it touches (reference counts). So
the zygote prepares as much as possible, and the child touches only what it needs (330 page faults of an empty program became
200).
"""

import _thread
import atexit
import builtins
import io
import marshal
import os
import signal
import sys
import threading
import types
from collections.abc import Callable

from worker.sandbox.inside import _zygote, session, source
from worker.sandbox.inside.payload import place_files

MAIN_FILE = _zygote.MAIN_FILE
BINARY_FD = 5  # native/zygote.h

_begin, _report_completed, _report_value = _zygote.begin, _zygote.report_completed, _zygote.report_value
_leave, _thread_count, _shutdown_threads = os._exit, _thread._count, threading._shutdown  # type: ignore[attr-defined]
_run_exit_functions, _thread_exit_functions = atexit._run_exitfuncs, threading._threading_atexits  # type: ignore[attr-defined]
_own_folder = _own_pids = False
_main = types.ModuleType("__main__")  # the program's own, so that its classes pickle and inspect finds its source
_reseed: list[Callable[[], object]] = []
_plain_streams: tuple[object, object] = ()  # type: ignore[assignment]


def prepare(*, own_folder: bool, own_pids: bool) -> None:
    """Call once, in the zygote: prepares everything that is the same for all programs.

    `own_folder`: there is no private /tmp. `own_pids`: each program has a PID namespace, in which it is always number 2.
    """
    global _own_folder, _own_pids, _plain_streams
    _own_folder, _own_pids = own_folder, own_pids
    if own_pids:
        threading.main_thread()._native_id = 2  # type: ignore[attr-defined]
    # Unbuffered, as `python -u`: output is written however the program ends. The objects hold descriptor numbers; nothing
    # is written before the child has its own files there.
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), encoding="utf-8", errors="surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _writer(1, "<stdout>", "surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2, "<stderr>", "backslashreplace")  # type: ignore[misc]
    _plain_streams = sys.stdout, sys.stderr
    for own in [name for name in sys.modules if name.partition(".")[0] == "worker"]:
        del sys.modules[own]
    _main.__dict__.update(__file__=MAIN_FILE, __builtins__=builtins, __cached__=None, __annotations__={})
    sys.modules["__main__"] = _main
    sys.argv = [MAIN_FILE]
    _reseed.extend(source.reseeders())


def run(payload: str | bytes) -> None:
    if not _own_pids:
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored so far, as by the runner; a jail restores it
    for reseed in _reseed:
        reseed()
    if _own_folder:
        _use_own_folder()
    if isinstance(payload, str):
        code, echo_value = payload, False
        if _own_folder:
            _write(MAIN_FILE, code)  # else `_zygote.serve` has written it
    else:
        code, echo_value = _arrange(payload)
    _begin()

    exit_code = 1
    try:
        exit_code = _execute(code, echo_value)
        try:
            if _thread_count() or _thread_exit_functions:
                _shutdown_threads()
            _run_exit_functions()
        except BaseException as error:  # from the program's own exit function
            exit_code = source.show_error(error, __file__, sys.excepthook)
        if "__del__" in code:
            _main.__dict__.clear()  # runs finalizers, as at the end of a script
        exit_code = _flush(exit_code)
    finally:
        _leave(exit_code)


def _writer(fd: int, name: str, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    raw.name = name
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)


def _use_own_folder() -> None:
    """Without a mount namespace: the program's folder replaces /tmp and /mnt, and its file is in the parent folder."""
    global MAIN_FILE
    folder = os.getcwd()  # noqa: PTH109
    sys.argv[0] = _main.__file__ = MAIN_FILE = os.path.join(os.path.dirname(folder), "main.py")  # noqa: PTH118, PTH120
    os.environ.update(HOME=folder, TMPDIR=folder, MPLCONFIGDIR=f"{folder}/.matplotlib")
    if "tempfile" in sys.modules:
        setattr(sys.modules["tempfile"], "tempdir", None)  # noqa: B010
    sys.path[0] = folder


def _arrange(packed: bytes) -> tuple[str, bool]:
    """Apply the payload's other parts. Does not return for a session or a program in another language."""
    # The fields of a `Payload`, as a plain tuple, which touches fewer pages.
    code, argv, env, files, echo_value, command, source_file, is_session = marshal.loads(packed)
    if _own_folder:
        for path in [path for path in files if path.startswith(("/tmp/", "/mnt/"))]:
            files[path[5:]] = files.pop(path)
    if env:
        os.environ.update(env)
    if is_session:
        session.serve(files, _begin)
    if files:
        place_files(files)
    if command:
        if source_file:
            _write(source_file, code)
        _become(command, argv)
    _write(MAIN_FILE, code)
    if argv:
        sys.argv += argv
    return code, echo_value


def _become(command: list[str], argv: list[str]) -> None:
    """Replace this process by a program in another language."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # restores the defaults that Python changed
        signal.signal(number, signal.SIG_DFL)
    arguments = [part or "program" for part in command] + argv
    _begin()
    try:
        os.execve(command[0] or BINARY_FD, arguments, dict(os.environ))
    except OSError as error:
        print(f"{arguments[0]}: {error.strerror}", file=sys.stderr)
        os._exit(126)


def _write(path: str, code: str) -> None:
    _zygote.write_file(path, code.encode("utf-8", "surrogatepass"))


def _execute(code: str, echo_value: bool) -> int:
    """Returns the exit code."""
    excepthook = sys.excepthook
    try:
        if echo_value:
            body, last = source.compile_with_value(code, MAIN_FILE)
        else:
            body, last = compile(code, MAIN_FILE, "exec", dont_inherit=True), None
    except BaseException as error:
        error.__traceback__ = None  # as for a script that does not compile: without frames
        excepthook(type(error), error, None)
        return 1
    try:
        exec(body, _main.__dict__)
        if last is not None:
            value = eval(last, _main.__dict__)
            if value is not None:
                _report_value(repr(value).encode("utf-8", "backslashreplace"))
    except SystemExit as error:
        return source.exit_code(error)
    except BaseException as error:
        return source.show_error(error, __file__, sys.excepthook)
    _report_completed()
    return 0


def _flush(code: int) -> int:
    out, err = sys.stdout, sys.stderr
    if out is _plain_streams[0] and err is _plain_streams[1] and out.write_through and err.write_through:  # type: ignore[attr-defined]
        return code  # they do not buffer
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            code = code or 120  # as CPython
    return code
