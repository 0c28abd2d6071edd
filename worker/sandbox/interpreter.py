"""The Python that runs programs: the service's own, or another one on this machine.

`EXEC_PROGRAM_PYTHON` names it, or else the link `.python` in the folder of the packages, which are installed for one Python.

The other Python describes itself: it runs this file. So only the standard library is imported here.
"""

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

OLDEST = (3, 11)
LINK = ".python"
INSIDE = Path(__file__).parent / "inside"
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Interpreter:
    path: str  # of the interpreter itself, not of a virtual environment's link to it
    prefix: str
    version: str
    site_folders: list[str]  # of packages that are installed for it, which programs do not see
    suffix: str  # of C extensions


def own() -> Interpreter:
    base = {"base": sys.base_prefix, "platbase": sys.base_prefix}
    folders = {sysconfig.get_path(kind, "posix_prefix", vars=base) for kind in ("purelib", "platlib")}
    return Interpreter(
        os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        sys.base_prefix,
        ".".join(map(str, sys.version_info[:3])),
        sorted(folders),
        sysconfig.get_config_var("EXT_SUFFIX"),
    )


@cache
def find(path: str, packages: Path) -> Interpreter:
    """The interpreter for programs. Raises OSError if it cannot run them."""
    if not path and not (packages / LINK).is_symlink():
        return own()
    path = path or str((packages / LINK).readlink())
    try:
        done = subprocess.run([path, "-I", __file__], capture_output=True, text=True, check=True, timeout=PATIENCE_S, cwd="/")
        found = Interpreter(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise OSError(f"{path} is not a Python that can run programs: {error}") from error
    if tuple(map(int, found.version.split(".")[:2])) < OLDEST:
        raise OSError(f"{path} is Python {found.version}; programs need 3.11 or newer")
    if not (INSIDE / f"_zygote{found.suffix}").exists():
        raise OSError(
            f"the sandbox's C part is not built for {path} (Python {found.version}): run `make install PROGRAM_PYTHON={path}`"
        )
    return found


if __name__ == "__main__":
    print(json.dumps(asdict(own())))
