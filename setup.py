"""Builds the sandbox's C part. Its table of system calls is made from this machine's headers, so it fits the architecture.

Without a compiler the rest still installs (a trainer needs only the client); the runner then reports the missing part.
"""

import re
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("worker/sandbox/inside/native")


class BuildWithSyscallTable(build_ext):
    def build_extension(self, ext: Extension) -> None:
        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_syscall_table(self.compiler.compiler[0], folder / "syscall_table.h")
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"no C compiler: {error}") from error  # the kind that `optional` forgives
        ext.include_dirs.append(str(folder))
        super().build_extension(ext)


def write_syscall_table(cc: str, path: Path) -> None:
    macros = subprocess.run(
        [cc, "-E", "-dM", "-include", "sys/syscall.h", "-x", "c", "/dev/null"], capture_output=True, text=True, check=True
    ).stdout
    names = sorted(set(re.findall(r"^#define __NR_(\w+) ", macros, re.M)))
    rows = "".join(f'    {{"{name}", __NR_{name}}},\n' for name in names)
    path.write_text(
        f"#include <sys/syscall.h>\nstatic const struct {{ const char *name; long number; }} SYSCALL_TABLE[] = {{\n{rows}}};\n"
    )


setup(
    ext_modules=[
        Extension(
            "worker.sandbox.inside._zygote",
            sources=sorted(str(path) for path in NATIVE.glob("*.c")),
            depends=[str(path) for path in NATIVE.glob("*.h")],
            define_macros=[("_GNU_SOURCE", None)],
            extra_compile_args=["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildWithSyscallTable},
)
