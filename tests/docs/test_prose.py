"""The prose check finds what it is made for, and finds nothing in this tree."""

import runpy
from pathlib import Path
from typing import Any

PROSE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "deploy" / "prose.py"))


def test_prose_of_this_tree_is_clean() -> None:
    texts = dict(PROSE["prose"]())
    assert {"README.md", "docs/quickstart.md", "exec_service/cli/up.py", "exec_client/errors.py"} <= set(map(str, texts))
    assert [*PROSE["misspellings"](texts), *PROSE["house_style"](texts)] == []


def test_misspelling_and_archaic_word_are_found_with_their_line() -> None:
    module = PROSE["prose_of_module"]('x = 1\nraise ValueError(\n    f"recieve {x} anew, the queue is away"\n)\n')
    page = PROSE["prose_of_page"]("A page.\n\n```sh\nteh code\n```\n\nSay `teh` teh same.\n")
    texts = {Path("m.py"): module, Path("p.md"): page}
    assert sorted(line.partition(" ==>")[0] for line in PROSE["misspellings"](texts)) == ["./m.py:3: recieve", "./p.md:7: teh"]
    assert [line.partition("': ")[0] for line in PROSE["house_style"](texts)] == ["m.py:3: 'anew", "m.py:3: 'is away"]
