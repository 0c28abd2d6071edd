"""Reads tests/trust.md, and runs its tests against an older commit with this tree's tests: all of them must fail there.

python tests/trust.py --list
python tests/trust.py --base COMMIT [--section NUMBER]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "trust.md"
# An editable install finds modules of this tree that the older one does not have.
NO_OTHER_TREE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith("__editable__")]
"""
OPTIONS = ["-q", "-rA", "-p", "no:cacheprovider", "--tb=no", "--continue-on-collection-errors"]


class Promise(NamedTuple):
    section: str
    words: str
    tests: list[str]


def promises() -> list[Promise]:
    found: list[Promise] = []
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith(("| promise", "| ---")):
            words, tests = (cell.strip() for cell in line.strip("| ").split(" | ", 1))
            found.append(Promise(section, words, re.findall(r"`(tests/[^`]+)`", tests)))
    return found


def tree_of(base: str, folder: Path) -> None:
    """That commit with the tests of this tree, set up with this tree's packages, its C part built."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "checkout", "--quiet", base], cwd=folder, check=True)
    shutil.rmtree(folder / "tests")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".sandbox-packages", ".tools"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    (folder / "sitecustomize.py").write_text(NO_OTHER_TREE)
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )


def outcomes(folder: Path, tests: list[str]) -> dict[str, str]:
    """What became of each test that pytest has found, by its node id."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    return {node: word for word, node in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (tests/\S+)", run.stdout, re.M)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/trust.py", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="print the tests and end")
    parser.add_argument("--base", help="the commit in which every test has to fail")
    parser.add_argument("--section", default="", help="only the section that begins with this number")
    options = parser.parse_args()
    wanted = list(
        dict.fromkeys(test for promise in promises() if promise.section.startswith(options.section) for test in promise.tests)
    )
    if options.list or not options.base:
        print("\n".join(wanted))
        return 0
    with tempfile.TemporaryDirectory(prefix="exec-trust-") as name:
        folder = Path(name) / "base"
        tree_of(options.base, folder)
        words = outcomes(folder, wanted)
    passed = [node for node, word in words.items() if word == "PASSED"]
    silent = [test for test in wanted if not any(node == test or node.startswith((f"{test}[", f"{test}::")) for node in words)]
    for node, word in sorted(words.items()):
        print(f"{word:<8} {node}")
    for test in silent:
        print(f"ERROR    {test} (its file cannot be collected there)")
    print(f"{len(words) - len(passed) + len(silent)} fail in {options.base}, {len(passed)} pass")
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
