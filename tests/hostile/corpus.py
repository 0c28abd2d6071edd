"""The hostile corpus: one file per program, what must become of it in the comments at its top, and the judging of what did.

    # A 1: one line on what it tries                   (the first line)
    # expect: status=timeout|cpu_limit max_wall_s=2    see `Expectation`
    # limits: wall_s=0.5 memory_mb=64                  else those of `LIMITS`
    # stdin: text with \\n escapes                      # stdin_mb: 10
    # fetch: names of files                            # env: NAME=value
    # bait                                             gets the means to find a file, a socket and a process of the host
    # needs: cgroup landlock|mntns x86_64              layers (one of those), or FEATURES; without them it is skipped
    # pair: f_069_listener.py                          runs beside it, in another slot
    # after: f_074_leaver.py                           ran before it, in the same slot
    # tier-CD: stdout_has=...                          what else is right in these tiers
    # without cgroup: status=error                     and where this layer is missing

A program reports what it achieved. Whatever else is expected: no line of its output may begin with `escaped`, and one that ends
well without `stdout...` being given has `contained` as its last line. Programs of group I begin with `//` instead of `#`.

Group J of the design, faults in the sandbox's own set-up, needs a hook and not a program: it is
tests/worker/test_sandbox_setup_faults.py.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exec_wire import BLAME, Limits, Result, Sandbox

FOLDER = Path(__file__).parent / "programs"
LANGUAGES = {".py": "python", ".cpp": "cpp"}
LIMITS: dict[str, float] = {"wall_s": 5, "cpu_s": 5, "memory_mb": 128, "output_kb": 64, "processes": 32, "file_mb": 16}
FEATURES = {
    "cpp": "no C++ compiler is installed",
    "x86_64": "the program has the numbers of x86_64's system calls",
    "cpu_shares": "this worker's control groups do not share the CPU by slot",
}
CROWD_PATIENCE = 8  # times the wall limit, for programs that are to end by themselves, beside 8 copies on few cores
LATE_S, LATE_IN_A_CROWD_S = 0.5, 10.0  # what a killed program may take beyond its limit on a busy machine
_KEYS = "status exit signal blame completed stdout stdout_has stderr_has stderr_lacks max_wall_s files differs".split()
_NAME = re.compile(r"([a-k])_(\d{3})_(\w+)\.(py|cpp)")


class BadHeader(Exception):
    pass


@dataclass(frozen=True)
class Expectation:
    """`None`: not specified."""

    status: tuple[str, ...] = ()
    exit: int | None = None
    signal: int | None = None
    blame: str | None = None  # if not given: what the status implies
    completed: bool | None = None
    stdout: str | None = None
    stdout_has: str | None = None
    stderr_has: str | None = None
    stderr_lacks: str | None = None
    max_wall_s: float | None = None
    files: tuple[str, ...] | None = None  # the names of those that were fetched
    differs: bool = False  # no two runs print the same

    @property
    def words(self) -> str:
        more = [f"{name} {value}" for name in ("exit", "signal") if (value := getattr(self, name)) is not None]
        return " ".join(["|".join(self.status), *more])


@dataclass(frozen=True)
class Program:
    name: str  # of its file
    group: str
    number: int
    title: str
    code: str
    language: str
    expect: Expectation
    otherwise: tuple[tuple[str, dict[str, Any]], ...] = ()  # ("tier-D" or "without cgroup", what is different)
    in_cell: dict[str, Any] = field(default_factory=dict)  # what is different of a cell
    not_as_cell: str = ""  # why it says nothing about cells
    limits: dict[str, float] = field(default_factory=dict)
    stdin: str = ""
    fetch: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    pair: str = ""
    after: str = ""
    bait: bool = False

    def limits_in(self, crowd: bool) -> Limits:
        """In a crowd a program that is to end by itself gets the time that it needs there."""
        values = LIMITS | self.limits
        for name, end in (("wall_s", "timeout"), ("cpu_s", "cpu_limit")):
            if crowd and name in values and end not in self.expect.status:
                values[name] *= CROWD_PATIENCE
        return Limits(**{name: value if name.endswith("_s") else int(value) for name, value in values.items()})

    def expectation(self, sandbox: Sandbox) -> Expectation:
        expect = self.expect
        for condition, change in self.otherwise:
            kind, _, what = condition.replace("-", " ", 1).partition(" ")
            if sandbox.tier in what if kind == "tier" else what not in sandbox.layers:
                expect = replace(expect, **change)
        return expect

    def as_cell(self) -> Program:
        """As a cell of a session: of its kinds of end, those that are its session's too are the same."""
        return replace(self, expect=replace(self.expect, **self.in_cell))

    def lacking(self, sandbox: Sandbox, features: set[str]) -> str:
        """Why it is skipped here; empty if it is not."""
        for need in self.needs:
            if need in FEATURES and need not in features:
                return FEATURES[need]
            if need not in FEATURES and not set(need.split("|")) & set(sandbox.layers):
                return f"the layer {need.replace('|', ' or ')} is not there"
        return ""


def load() -> dict[str, Program]:
    programs = {path.name: parse(path) for path in sorted(FOLDER.iterdir()) if path.suffix in LANGUAGES}
    for program in programs.values():
        for other in filter(None, (program.pair, program.after)):
            if other not in programs:
                raise BadHeader(f"{program.name}: there is no {other}")
    return programs


def parse(path: Path) -> Program:
    matched = _NAME.fullmatch(path.name)
    if matched is None:
        raise BadHeader(f"{path.name}: a name is <group>_<number, 3 digits>_<words>")
    code = path.read_text()
    group, number = matched[1].upper(), int(matched[2])
    lines = _header(code)
    title = lines.pop(0) if lines else ""
    if not title.startswith(f"{group} {number}: "):
        raise BadHeader(f"{path.name}: its first line says `{group} {number}: ...`")
    fields: dict[str, Any] = {}
    otherwise = []
    for line in lines:
        key, _, text = line.partition(":")
        key, text = key.strip(), text.strip()
        if key.startswith(("tier-", "without ")):
            otherwise.append((key, _expected(path.name, text)))
        elif key in fields:
            raise BadHeader(f"{path.name}: `{key}` is there twice")
        else:
            fields[key] = text
    if "expect" not in fields:
        raise BadHeader(f"{path.name}: nothing is expected of it")
    program = Program(
        path.name,
        group,
        number,
        title.partition(": ")[2],
        code,
        LANGUAGES[path.suffix],
        Expectation(**_expected(path.name, fields.pop("expect"))),
        tuple(otherwise),
        _expected(path.name, fields.pop("expect-cell", "")),
        fields.pop("not-as-cell", ""),
        limits=_limits(path.name, fields.pop("limits", "")),
        stdin=_unescape(fields.pop("stdin", "")) + "x" * (int(fields.pop("stdin_mb", 0)) << 20),
        fetch=tuple(fields.pop("fetch", "").split()),
        env=dict(pair.split("=", 1) for pair in shlex.split(fields.pop("env", ""))),
        needs=tuple(fields.pop("needs", "").split()),
        pair=fields.pop("pair", ""),
        after=fields.pop("after", ""),
        bait=fields.pop("bait", None) is not None,
    )
    if fields:
        raise BadHeader(f"{path.name}: nobody knows `{', '.join(fields)}`")
    if not program.expect.status:
        raise BadHeader(f"{path.name}: no status is expected")
    return program


def _header(code: str) -> list[str]:
    """The comment lines before the first line of the program."""
    lines = []
    for line in code.splitlines():
        if not line.startswith(("# ", "// ")):
            break
        lines.append(line.lstrip("#/").strip())
    return lines


def _expected(name: str, text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in shlex.split(text):
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS:
            raise BadHeader(f"{name}: `{part}` is no expectation; there are {', '.join(_KEYS)}")
        values[key] = _read(name, key, value)
    return values


def _read(name: str, key: str, value: str) -> Any:
    match key:
        case "status":
            statuses = tuple(value.split("|"))
            if unknown := set(statuses) - set(BLAME):
                raise BadHeader(f"{name}: there is no status {', '.join(unknown)}")
            return statuses
        case "exit" | "signal":
            return int(value)
        case "max_wall_s":
            return float(value)
        case "completed" | "differs":
            return {"yes": True, "no": False}[value]
        case "files":
            return tuple(filter(None, value.split(",")))
        case _:
            return _unescape(value)


def _limits(name: str, text: str) -> dict[str, float]:
    limits = {key: float(value) for key, _, value in (part.partition("=") for part in text.split())}
    if unknown := limits.keys() - LIMITS.keys():
        raise BadHeader(f"{name}: there is no limit {', '.join(unknown)}")
    return limits


def _unescape(text: str) -> str:
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")


def judge(program: Program, result: Result, *, crowd: bool = False, grace_s: float = 0.0) -> list[str]:
    """The problems with a program's result; empty if it is as expected. `grace_s`: from the limit to the kill."""
    expect = program.expectation(result.sandbox)
    limits = program.limits_in(crowd)
    wrong = []
    if result.status not in expect.status:
        wrong.append(f"status {result.status}")
    elif not _blame_is_right(expect, result):
        wrong.append(f"blame {result.blame}")
    for key, got in (("exit", result.exit_code), ("signal", result.signal), ("completed", result.completed)):
        wanted = getattr(expect, key)
        if wanted is not None and got != wanted:
            wrong.append(f"{key} {got}")
    wrong += _wrong_output(expect, result)
    if expect.files is not None and tuple(sorted(result.files)) != tuple(sorted(expect.files)):
        wrong.append(f"files {sorted(result.files)}")
    latest = _latest_end_s(expect, result, limits, crowd) + grace_s
    if result.usage.wall_s > latest:
        wrong.append(f"took {result.usage.wall_s:.2f} s, more than {latest:.2f}")
    return wrong


def _blame_is_right(expect: Expectation, result: Result) -> bool:
    if expect.blame is not None:
        return result.blame == expect.blame
    return result.blame == BLAME[result.status]


def _wrong_output(expect: Expectation, result: Result) -> list[str]:
    wrong = [line for line in result.stdout.splitlines() if line.startswith("escaped")]
    if expect.stdout is not None:
        wrong += [] if result.stdout == expect.stdout else [f"stdout {result.stdout[-200:]!r}"]
    elif expect.stdout_has is not None:
        wrong += [] if expect.stdout_has in result.stdout else [f"stdout {result.stdout[-200:]!r}"]
    elif result.status == "ok" and not expect.differs and result.stdout.splitlines()[-1:] != ["contained"]:
        wrong.append(f"stdout {result.stdout[-200:]!r}")
    if expect.stderr_has is not None and expect.stderr_has not in result.stderr:
        wrong.append(f"stderr {result.stderr[-200:]!r}")
    if expect.stderr_lacks is not None and expect.stderr_lacks in result.stderr:
        wrong.append(f"stderr has {expect.stderr_lacks!r}")
    if wrong and result.stderr and expect.stderr_has is None:
        wrong.append(f"stderr {result.stderr[-200:]!r}")
    return wrong


def _latest_end_s(expect: Expectation, result: Result, limits: Limits, crowd: bool) -> float:
    late_s = LATE_IN_A_CROWD_S if crowd else LATE_S
    if expect.max_wall_s is not None and result.status != "timeout":
        return expect.max_wall_s * (CROWD_PATIENCE if crowd else 1)
    return limits.wall_s + late_s


def got_words(result: Result) -> str:
    parts = [result.status]
    if result.status == "error":
        parts.append(f"exit {result.exit_code}")
    if result.signal is not None:
        parts.append(f"signal {result.signal}")
    last = result.stdout.rstrip("\n").rsplit("\n", 1)[-1]
    if result.status == "ok" and last:
        parts.append(last[:60])
    return "".join(char if char.isprintable() else "?" for char in " ".join(parts))
