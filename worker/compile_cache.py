"""A cache of compiled programs by content, each a sealed memory file; the least recently used ones are dropped.

Concurrent calls with the same program wait for one compilation and share its compile error. Compile errors are not cached.
"""

import asyncio
import base64
import copy
import hashlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from exec_wire import Call, Result, verdict
from worker.languages import Compiled
from worker.sandbox.memory_files import MFD_EXEC, sealed

OUTPUT = "program"  # the compiler's output file, in its own folder
MAX_PROGRAMS = 256  # each is a descriptor, of which a process has 1024 by default

Compile = Callable[[Call], Awaitable[Result]]


class CompileFailed(Exception):
    """`result` is for the caller: a compile error, or a failure of the service."""

    def __init__(self, result: Result) -> None:
        self.result = result


class CompileCache:
    def __init__(self, max_bytes: int, max_programs: int = MAX_PROGRAMS) -> None:
        self._max_bytes, self._max_programs = max_bytes, max_programs
        self._bytes = 0
        self._programs: OrderedDict[str, tuple[int, int]] = OrderedDict()  # key -> descriptor and size
        self._running: dict[str, asyncio.Future[Result | None]] = {}  # the compile error, or None

    async def program(self, language: Compiled, call: Call, compile: Compile) -> int:
        """A descriptor of the compiled program, which the caller closes. `compile` runs the compiler."""
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
            arguments, limits = call.compile_args, language.limits  # the pool enforces the caller's deadline
            compiler_call = Call(call.code, language=language.name, argv=arguments, limits=limits, fetch_files=[OUTPUT])
            result = await compile(compiler_call)
            if result.status != "ok" or OUTPUT not in result.files:
                failed = _as_compile_error(result)
                # Failures of this one call, such as a timeout, are not shared.
                error = failed if failed.status == "compile_error" else None
                raise CompileFailed(failed)
            self._keep(key, base64.b64decode(result.files[OUTPUT]))
        finally:
            del self._running[key]
            done.set_result(error)

    def _keep(self, key: str, program: bytes) -> None:
        self._programs[key] = (sealed("program", program, MFD_EXEC), len(program))
        self._bytes += len(program)
        while len(self._programs) > 1 and (self._bytes > self._max_bytes or len(self._programs) > self._max_programs):
            _, (fd, size) = self._programs.popitem(last=False)
            os.close(fd)
            self._bytes -= size

    def close(self) -> None:
        for fd, _ in self._programs.values():
            os.close(fd)
        self._programs.clear()


def _key(language: Compiled, call: Call) -> str:
    parts = [language.name, str(language.path()), *call.compile_args, "", call.code]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _as_compile_error(result: Result) -> Result:
    """A failure of the compiler is the program's fault; a failure of the service is not."""
    if result.blame not in ("model", "none"):
        return result
    stderr = result.stderr or f"the compiler ended with {result.status}"
    failed = verdict("compile_error", exit_code=result.exit_code, stderr=stderr, truncated=result.truncated)
    failed.sandbox, failed.usage, failed.timings = result.sandbox, result.usage, result.timings
    return failed
