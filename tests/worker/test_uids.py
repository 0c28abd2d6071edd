# ruff: noqa: E501
"""Blocks of user ids, without a sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.sandbox import uids
from worker.sandbox.uids import BLOCK_SIZE, DEFAULT_BASE, NoFreeUids, mapped_base, take_block

BASE = 2_100_000_000


def test_two_owners_get_two_blocks_and_a_released_one_is_taken_again(tmp_path: Path) -> None:
    first, second = take_block(BASE, tmp_path), take_block(BASE, tmp_path)
    assert (first.base, second.base) == (BASE, BASE + BLOCK_SIZE)
    first.release()
    again = take_block(BASE, tmp_path)
    assert again.base == BASE
    again.release()
    second.release()


def test_block_of_a_dead_owner_is_free(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from worker.sandbox.uids import take_block; import os; take_block({BASE}, Path({str(tmp_path)!r})); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, cwd=Path(__file__).parents[2])
    block = take_block(BASE, tmp_path)
    assert block.base == BASE
    block.release()


def test_no_free_block_says_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "BLOCKS", 1)
    block = take_block(BASE, tmp_path)
    with pytest.raises(NoFreeUids, match=str(tmp_path)):
        take_block(BASE, tmp_path)
    block.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run as somebody else")
def test_processes_of_a_dead_owner_are_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], user=BASE + 5, group=BASE + 5, extra_groups=[], cwd="/")
    take_block(BASE, tmp_path).release()
    assert process.wait(5) == -9


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run as somebody else")
def test_processes_of_the_next_block_are_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], user=BASE + BLOCK_SIZE, group=BASE, extra_groups=[], cwd="/")
    take_block(BASE, tmp_path).release()
    assert process.poll() is None
    process.kill()
    process.wait()


def test_base_beyond_the_user_namespace_moves_into_it() -> None:
    assert mapped_base(DEFAULT_BASE, "         0          0 4294967295\n") == DEFAULT_BASE
    assert mapped_base(DEFAULT_BASE, "0 1879048192 65536\n") == 32768  # a pod with hostUsers: false
    assert mapped_base(40000, "0 1879048192 65536\n") == 40000
