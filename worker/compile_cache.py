"""Programs that were compiled before, by content: a sealed file in memory each, the least recently used ones dropped.

Calls that want the same program at the same time wait for one compilation, and share what the compiler says against it; whoever
comes later has it compiled again.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from exec_wire import Call, Result, verdict
from worker.languages import Compiled
from worker.sandbox.execution import sealed_program

OUTPUT = "program"  # what the compiler is told to make, in its own folder
MAX_PROGRAMS = 256  # each is a descriptor, of which a process has 1024 if nobody says otherwise

Compile = Callable[[Call], Awaitable[Result]]


class CompileFailed(Exception):
    """`result` is what the caller gets: the compiler's words, or our own failure."""

    def __init__(self, result: Result) -> None:
        self.result = result


class CompileCache:
    def __init__(self, max_bytes: int, max_programs: int = MAX_PROGRAMS) -> None:
        self._max_bytes, self._max_programs = max_bytes, max_programs
        self._bytes = 0
        self._programs: OrderedDict[str, tuple[int, int]] = OrderedDict()  # key -> descriptor and size
        self._running: dict[str, asyncio.Future[Result | None]] = {}  # a compile error, if that is what came of it

    async def program(self, language: Compiled, call: Call, compile: Compile) -> int:
        """A descriptor of the compiled program, the caller's own to close. `compile` runs the compiler."""
        key = _key(language, call)
        while key not in self._programs:
            if key not in self._running:
                await self._compile(key, language, call, compile)
            elif (error := await asyncio.shield(self._running[key])) is not None:
                raise CompileFailed(copy.copy(error))
        self._programs.move_to_end(key)
        return os.dup(self._programs[key][0])

    async def _compile(self, key: str, language: Compiled, call: Call, compile: Compile) -> None:
        self._running[key] = done = asyncio.get_running_loop().create_future()
        error = None
        try:
            result = await compile(compiler_call(language, call))
            if result.status != "ok" or OUTPUT not in result.files:
                failed = _as_compile_error(result)
                # Not what happened to this one call alone, such as the end of its time.
                error = failed if failed.status == "compile_error" else None
                raise CompileFailed(failed)
            self._keep(key, base64.b64decode(result.files[OUTPUT]))
        finally:
            del self._running[key]
            done.set_result(error)

    def _keep(self, key: str, program: bytes) -> None:
        self._programs[key] = (sealed_program(program), len(program))
        self._bytes += len(program)
        while len(self._programs) > 1 and (self._bytes > self._max_bytes or len(self._programs) > self._max_programs):
            _, (fd, size) = self._programs.popitem(last=False)
            os.close(fd)
            self._bytes -= size

    def close(self) -> None:
        for fd, _ in self._programs.values():
            os.close(fd)
        self._programs.clear()


def compiler_call(language: Compiled, call: Call) -> Call:
    """The call that compiles: the same source, the compiler's limits; the pool sees to the caller's deadline."""
    return Call(code=call.code, language=language.name, argv=call.compile_args, limits=language.limits, fetch_files=[OUTPUT])


def _key(language: Compiled, call: Call) -> str:
    parts = [language.name, str(language.path()), *call.compile_args, "", call.code]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _as_compile_error(result: Result) -> Result:
    """Whatever the compiler did to itself is the program's fault; what we did to it is not."""
    if result.blame not in ("model", "none"):
        return result
    words = result.stderr or f"the compiler ended with {result.status}"
    failed = verdict("compile_error", exit_code=result.exit_code, stderr=words, truncated=result.truncated)
    failed.sandbox, failed.usage, failed.timings = result.sandbox, result.usage, result.timings
    return failed
