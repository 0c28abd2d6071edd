"""A session in its confined process: receives cells through a socket and executes them in one persistent `__main__`.

The worker's messages are marshalled tuples (what, number, arguments) with descriptors; replies are short JSON objects with the
same number. A cell's value and display data go into a file that came with the message. The worker trusts none of it: a cell can
write to the socket too.

A fork is a sibling of this process (`fork_sibling`). It sends hello on a socket of its own, with which the kernel passes its
pid, and waits: the worker's first message comes when the fork is in a control group of its own.
"""

import builtins
import io
import json
import linecache
import marshal
import os
import random
import re
import signal
import stat
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from worker.sandbox.inside import _zygote, source
from worker.sandbox.inside.payload import place_files

CONTROL_FD = 6  # native/zygote.h
VALUE_CHARS = 64 << 10
DISPLAY_BYTES = 8 << 20  # of one cell's pictures and tables
MIME_OF_METHOD = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
}
_SEEDS = re.compile(r"seed|\bset_?state\b")  # after such a cell, forks continue the same random numbers

Reply = dict[str, Any]


def serve(files: dict[str, bytes], begin: Callable[[], None]) -> None:
    """Does not return: the process exits when its socket is closed."""
    leave = os._exit
    try:
        session = Session()
        place_files(files, session.work)
        _zygote.become_session()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        begin()
        session.loop()
    finally:
        leave(1)


class Session:
    def __init__(self) -> None:
        self._base = "/mnt" if os.getcwd() == os.path.realpath("/tmp") else f"{os.path.dirname(os.getcwd())}/mnt"  # noqa: PTH109, PTH120
        os.makedirs(self._base, exist_ok=True)  # noqa: PTH103
        self._open_folders = tuple(os.path.realpath(folder) + "/" for folder in (os.getcwd(), self._base))  # noqa: PTH109
        self._seeded = False
        self._display: list[dict[str, dict[str, str]]] = []
        self._display_left = 0
        main = types.ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __annotations__={}, display=self.display)
        sys.modules["__main__"] = main
        self._names = main.__dict__
        sys.argv = [""]
        sys.path[0] = ""
        self._use_folder("0")

    def loop(self) -> None:
        while True:
            message, numbers = _zygote.receive(CONTROL_FD)
            if not message:
                os._exit(0)
            what, number, arguments = marshal.loads(message)
            fds = memoryview(numbers).cast("i").tolist()
            reply: Reply | None = getattr(self, f"_{what}")(number, arguments, fds)  # run, files, fork, settle or restore
            if reply is not None:
                self._send_reply(number, reply)

    def _send_reply(self, number: int, reply: Reply) -> None:
        os.write(CONTROL_FD, json.dumps({"number": number, **reply}).encode()[:4000])

    # -- folders ------------------------------------------------------------------------------------------------------------

    def _within(self) -> str:
        """The current directory relative to its folder; `work` if it is outside."""
        within = os.path.relpath(os.getcwd(), os.path.realpath(self._folder))  # noqa: PTH109
        return "work" if within.startswith("..") else within

    def _use_folder(self, name: str, within: str = "work") -> None:
        """Use this folder. Each fork has its own, with `work`, where cells start, and `tmp`."""
        self._name = name
        self._folder = f"{self._base}/{name}"
        self.work = f"{self._folder}/work"
        os.makedirs(self.work, exist_ok=True)  # noqa: PTH103
        os.makedirs(f"{self._folder}/tmp", exist_ok=True)  # noqa: PTH103
        os.chdir(f"{self._folder}/{within}")
        os.environ.update(HOME=self.work, TMPDIR=f"{self._folder}/tmp")
        if "tempfile" in sys.modules:
            setattr(sys.modules["tempfile"], "tempdir", None)  # noqa: B010

    def _files(self, number: int, arguments: dict[str, Any], fds: list[int]) -> Reply:
        """Write files, then read files: both lists may be empty. Contents travel in descriptors."""
        payload_fd, out_fd = fds
        try:
            put, fetch = marshal.loads(_read_all(payload_fd))
            place_files(put, self.work)
            index, contents, left = [], [], arguments["most"]
            for path in dict.fromkeys(fetch):
                content = self._read(path, left)
                if isinstance(content, str):
                    index.append((path, 0, content))
                else:
                    index.append((path, len(content), ""))
                    contents.append(content)
                    left -= len(content)
            head = json.dumps(index).encode()
            _write_all(out_fd, len(head).to_bytes(8, "little") + head + b"".join(contents))
        except OSError as error:
            return {"code": 1, "why": _error_text(error)}
        finally:
            _close(fds)
        return {"code": 0}

    def _read(self, path: str, most: int) -> bytes | str:
        """Read a regular file in one of the session's folders (reading a pipe would block). Returns the reason why not as a
        string."""
        real_path = os.path.realpath(os.path.join(self.work, path))  # noqa: PTH118
        if not real_path.startswith(self._open_folders):
            return "it is not in a folder of the session"
        try:
            fd = os.open(real_path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return "no such file" if isinstance(error, FileNotFoundError) else f"it cannot be opened: {_error_text(error)}"
        with io.FileIO(fd) as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return "it is not a regular file"
            content = file.read(most + 1) if info.st_size <= most else None
            if content is None or len(content) > most:
                return f"{info.st_size} bytes; there is room for {most} in this result"
            return content

    # -- cells --------------------------------------------------------------------------------------------------------------

    def _run(self, number: int, arguments: dict[str, Any], fds: list[int]) -> Reply:
        payload_fd, stdin_fd, stdout_fd, stderr_fd, out_fd = fds
        code: str = marshal.loads(_read_all(payload_fd))
        for fd, standard in ((stdin_fd, 0), (stdout_fd, 1), (stderr_fd, 2)):
            os.dup2(fd, standard)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="surrogateescape")
        _close([payload_fd, stdin_fd, stdout_fd, stderr_fd])
        self._seeded = self._seeded or _SEEDS.search(code) is not None
        self._display, self._display_left = [], DISPLAY_BYTES
        get_pid, leave = os.getpid, os._exit
        pid = get_pid()
        exit_code, value, completed = self._interruptible(code, f"<cell {arguments['cell']}>")
        if get_pid() != pid:  # a child that the cell forked and that reached its end: only the session's own process replies
            leave(exit_code)
        extras = {"value": value, "display": self._display, "completed": completed}
        _write_all(out_fd, json.dumps(extras).encode())
        _close([out_fd])
        return {"code": exit_code}

    def _interruptible(self, code: str, name: str) -> tuple[int, str | None, bool]:
        """SIGINT interrupts the cell that runs and is ignored afterwards."""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                return self._execute(code, name)
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:  # SIGINT came after the cell's last line
            return 130, None, False

    def _execute(self, code: str, name: str) -> tuple[int, str | None, bool]:
        """Returns the exit code of a script, the last expression's value, and whether the last line was reached."""
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            try:
                body, last = source.compile_with_value(code, name)
            except BaseException as error:
                error.__traceback__ = None
                raise
            exec(body, self._names)
            value = None if last is None else eval(last, self._names)
            shown = None if value is None else repr(value)
            if value is not None:
                self._names["_"] = value
                self._show_richly(value)
            self._show_figures()
        except SystemExit as error:
            return source.exit_code(error), None, False
        except BaseException as error:
            # Python's own printer, in C, does not know the lines of a cell.
            is_own = sys.excepthook is sys.__excepthook__
            hook = traceback.print_exception if is_own else sys.excepthook
            return source.show_error(error, __file__, hook), None, False
        return 0, None if shown is None else _valid_unicode(shown[:VALUE_CHARS]), True

    # -- display data -------------------------------------------------------------------------------------------------------

    def display(self, *values: object) -> None:
        """Show values as a notebook would: as text, and as pictures or tables if possible."""
        for value in values:
            print(repr(value))
            self._show_richly(value)

    def _show_richly(self, value: object) -> None:
        shown = {}
        for method, mime in MIME_OF_METHOD.items():
            make = getattr(type(value), method, None)
            data = make(value) if callable(make) else None
            if isinstance(data, bytes):
                data = _base64(data)
            if isinstance(data, str):
                shown[mime] = _valid_unicode(data)
        self._add(shown)

    def _show_figures(self) -> None:
        plots = sys.modules.get("matplotlib.pyplot")
        if plots is None:
            return
        for number in plots.get_fignums():
            picture = io.BytesIO()
            plots.figure(number).savefig(picture, format="png", bbox_inches="tight")
            self._add({"image/png": _base64(picture.getvalue())})
        plots.close("all")

    def _add(self, shown: dict[str, str]) -> None:
        size = sum(map(len, shown.values()))
        if shown and size <= self._display_left:
            self._display.append({"data": shown})
            self._display_left -= size
        elif shown:
            print(f"[{size} bytes of display data left out: a cell may show {DISPLAY_BYTES}]", file=sys.stderr)

    # -- forks --------------------------------------------------------------------------------------------------------------

    def _fork(self, number: int, arguments: dict[str, Any], fds: list[int]) -> Reply | None:
        """Make one fork for each of `names`. Each gets a control socket, a socket for hello, and usually files to enter its
        group.

        A checkpoint is a fork that waits, with a copy of the folder if that has at most `copy_most` bytes.
        """
        try:
            for name in arguments["gone"]:
                _zygote.remove_folder(f"{self._base}/{name}")
                _zygote.remove_folder(f"{self._base}/.{name}")
            if why := _fork_obstacle():
                return {"code": 1, "why": why}
            copy_most = arguments["copy_most"]
            files = copy_most is None or self._copy_folder(f"{self._base}/.{self._name}", copy_most)
            state = random.getstate() if self._seeded else None
            for index, name in enumerate(arguments["names"]):
                if _zygote.fork_sibling() == 0:
                    each = arguments["fds_each"]
                    self._become_fork(name, state, *fds[each * index : each * (index + 1)])
                    return None
            return {"code": 0, "files": files}
        except OSError as error:
            return {"code": 1, "why": _error_text(error)}
        finally:
            _close(fds)

    def _become_fork(self, number: int, state: Any, control_fd: int, hello_fd: int, *join_fd: int) -> None:
        for fd in join_fd:
            os.write(fd, b"0")
        os.dup2(control_fd, CONTROL_FD, inheritable=False)
        os.write(hello_fd, b"h")
        if state is not None:
            random.setstate(state)  # the module reseeds itself in every fork
        else:
            for reseed in source.reseeders():
                reseed()
        self._send_reply(number, {"code": 0})

    def _settle(self, number: int, arguments: dict[str, Any], fds: list[int]) -> Reply:
        """A fork starts to use a copy of its parent's folder."""
        within = self._within()
        try:
            _copy_tree(self._folder, f"{self._base}/{arguments['name']}", None)
        except OSError as error:
            return {"code": 1, "why": f"its folder cannot be copied: {_error_text(error)}"}
        self._use_folder(arguments["name"], within)
        return {"code": 0}

    def _restore(self, number: int, arguments: dict[str, Any], fds: list[int]) -> Reply:
        """A checkpoint replaces the session's process, which is dead."""
        within = self._within()
        if arguments["files"]:
            os.chdir("/")
            _zygote.remove_folder(self._folder)
            os.rename(f"{self._base}/.{self._name}", self._folder)  # noqa: PTH104
        self._use_folder(self._name, within)
        return {"code": 0}

    def _copy_folder(self, target: str, most: int) -> bool:
        _zygote.remove_folder(target)
        try:
            _copy_tree(self._folder, target, most)
        except OSError:
            _zygote.remove_folder(target)
            return False
        return True


def _fork_obstacle() -> str:
    """A fork has one thread and no children, so other threads and children would be missing in it."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    if threads > 1:
        return f"it has {threads - 1} threads besides the main one"
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = [pid for pid in file.read().split() if _is_alive(pid)]
    return f"it has {len(children)} living child processes" if children else ""


def _is_alive(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _copy_tree(source: str, target: str, most: int | None) -> None:
    """Copy files, folders and links. OSError if these have more than `most` bytes."""
    taken = 0
    folders = [(source, target)]
    while folders:
        here, there = folders.pop()
        os.makedirs(there, exist_ok=True)  # noqa: PTH103
        with os.scandir(here) as entries:
            for entry in entries:
                copy = f"{there}/{entry.name}"
                if entry.is_symlink():
                    os.symlink(os.readlink(entry.path), copy)  # noqa: PTH115, PTH211
                elif entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, copy))
                elif entry.is_file(follow_symlinks=False):
                    taken += entry.stat().st_size
                    if most is not None and taken > most:
                        raise OSError(f"more than {most} bytes")
                    _copy_file(entry.path, copy)


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb") as from_, open(target, "wb") as to:
        os.fchmod(to.fileno(), os.fstat(from_.fileno()).st_mode & 0o777)
        while os.sendfile(to.fileno(), from_.fileno(), None, 1 << 30):
            pass


def _valid_unicode(text: str) -> str:
    """Escape lone surrogates, which JSON decoders refuse."""
    return text.encode("utf-8", "backslashreplace").decode()


def _error_text(error: OSError) -> str:
    return (error.strerror or str(error))[:200]


def _base64(data: bytes) -> str:
    import binascii

    return binascii.b2a_base64(data, newline=False).decode()


def _read_all(fd: int) -> bytes:
    with io.FileIO(fd, closefd=False) as file:
        return file.readall()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
