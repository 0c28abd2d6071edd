"""What the fields of a request may contain: how many files, paths, variables and arguments, how deep and how long they are.

The one place for this rule and for the form of a path. A gateway checks every request by its settings, a worker every call by
`MOST` before it makes a sandbox. Each check counts first, so a refusal costs no more than the bounds allow.
"""

import re
from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct

from exec_wire.messages.calls import Call

OPEN_FOLDERS = ("tmp", "mnt")  # where a program may write by an absolute path
HOME = "/tmp/"  # where relative paths of a call lie; those of a session lie in a folder of its own
INODES = 8192 - 8  # of the workspace (native/steps.c), less what is in it before the first file
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255  # of one part of a path; Linux NAME_MAX

_PLAIN = re.compile(r"(?:\w[\w.-]{0,199}/)*\w[\w.-]{0,199}", re.ASCII)  # most paths: nothing to normalise


class Bounds(Struct, frozen=True):
    """Of one call or session; `exec_service.config` says what each is."""

    files: int = 4096
    path_depth: int = 32
    variables: int = 2048
    text_bytes: int = 1 << 20


MOST = Bounds(files=8192, path_depth=128, variables=8192, text_bytes=16 << 20)
"""What a gateway can be set to, and what a worker takes."""


class WrongField(ValueError):
    """`field` is relative to the message: `files`, `argv[3]`."""

    def __init__(self, field: str, words: str) -> None:
        super().__init__(words)
        self.field = field


def check_call(call: Call, bounds: Bounds) -> None:
    """Raises `WrongField`."""
    if call.files:
        check_files(call.files, bounds)
    if call.fetch_files:
        check_paths(call.fetch_files, bounds)
    if call.env:
        check_variables(call.env, bounds)
    if call.argv:
        check_arguments(call.argv, bounds)


def check_files(paths: Collection[str], bounds: Bounds, home: str = HOME) -> None:
    """Each names a place of its own, and none lies below another."""
    _check_count("files", len(paths), bounds.files)
    seen: dict[str, str] = {}
    folders: set[str] = set()
    bytes_ = 0
    for path in paths:
        field = f"files[{quote(path)}]"
        bytes_ += len(path)
        place = _checked_path(path, field, bounds)
        if not place.startswith("/"):
            place = home + place
        if place in seen:
            raise WrongField(field, f"names the same file as {quote(seen[place])}")
        seen[place] = path
        folder = place.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
        if len(seen) + len(folders) > INODES:
            raise WrongField("files", f"more than {INODES} files and folders; there is room for no more")
    _check_bytes("files", bytes_, bounds)
    if both := seen.keys() & folders:
        below = next(path for place, path in seen.items() if not both.isdisjoint(_folders_of(place)))
        raise WrongField(f"files[{quote(below)}]", "lies under a path that is itself a file")


def _folders_of(place: str) -> Iterator[str]:
    while place := place.rpartition("/")[0]:
        yield place


def check_paths(paths: Collection[str], bounds: Bounds, name: str = "fetch_files") -> None:
    _check_count(name, len(paths), bounds.files)
    _check_bytes(name, sum(map(len, paths)), bounds)
    for index, path in enumerate(paths):
        _checked_path(path, f"{name}[{index}]", bounds)


def check_variables(env: Mapping[str, str], bounds: Bounds) -> None:
    _check_count("env", len(env), bounds.variables)
    _check_bytes("env", sum(map(_bytes_of, env)) + sum(map(_bytes_of, env.values())), bounds)
    for name, value in env.items():
        if not name or "=" in name:
            raise WrongField(f"env[{quote(name)}]", "the name of a variable must not be empty or contain '='")
        if "\0" in name or "\0" in value:
            raise WrongField(f"env[{quote(name)}]", "a variable must not contain NUL")


def check_arguments(arguments: Collection[str], bounds: Bounds, name: str = "argv") -> None:
    _check_count(name, len(arguments), bounds.variables)
    _check_bytes(name, sum(map(_bytes_of, arguments)), bounds)
    for index, argument in enumerate(arguments):
        if "\0" in argument:
            raise WrongField(f"{name}[{index}]", "an argument must not contain NUL")


def normal_path(path: str) -> str:
    """`a/b`, `/tmp/a` or `/mnt/a`: without empty parts and `.`. `ValueError` says why it is no file's path."""
    if len(path) > MAX_PATH_BYTES:
        raise ValueError("a path is too long")
    if _PLAIN.fullmatch(path):
        return path
    if "\0" in path:
        raise ValueError("a path must not contain NUL")
    parts = path.split("/")
    names = [name for name in parts if name not in ("", ".")]
    absolute = path.startswith("/")
    if parts[-1] in ("", ".") or (absolute and len(names) == 1 and names[0] in OPEN_FOLDERS):
        raise ValueError("a path must name a file")
    if absolute and (path.startswith("//") or names[0] not in OPEN_FOLDERS):
        raise ValueError(f"an absolute path must be under {' or '.join(f'/{folder}' for folder in OPEN_FOLDERS)}")
    if ".." in names:
        raise ValueError("a path must not contain '..'")
    if _bytes_of(path) > MAX_PATH_BYTES or any(_bytes_of(name) > MAX_NAME_BYTES for name in names):
        raise ValueError("a path is too long")
    return "/" * absolute + "/".join(names)


def quote(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")


def _checked_path(path: str, field: str, bounds: Bounds) -> str:
    try:
        normal = normal_path(path)
    except ValueError as error:
        raise WrongField(field, str(error)) from None
    if normal.count("/") > bounds.path_depth:
        raise WrongField(field, f"lies {normal.count('/')} folders deep; at most {bounds.path_depth} are accepted")
    return normal


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise WrongField(name, f"has {count} entries; at most {most} are accepted")


def _check_bytes(name: str, bytes_: int, bounds: Bounds) -> None:
    if bytes_ > bounds.text_bytes:
        raise WrongField(name, f"its text has {bytes_} bytes; at most {bounds.text_bytes} are accepted")


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
