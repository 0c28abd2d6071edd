# ruff: noqa: E501
"""Blocks of user ids, without a sandbox."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_harness import bystander

from worker.sandbox import uids
from worker.sandbox.uids import BLOCK_SIZE, DEFAULT_BASE, NoFreeUids, kill_all_of, mapped_base, take_block

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


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run as somebody else")


@needs_root
def test_processes_of_a_dead_owner_are_killed(tmp_path: Path) -> None:
    take_block(BASE, tmp_path).leave()  # as when its owner dies
    with bystander(BASE + 5) as process:
        take_block(BASE, tmp_path).release()
        assert process.wait(5) == -9


@needs_root
def test_processes_of_the_next_block_are_left_alone(tmp_path: Path) -> None:
    take_block(BASE, tmp_path).leave()
    with bystander(BASE + BLOCK_SIZE) as process:
        take_block(BASE, tmp_path).release()
        assert process.poll() is None


@needs_root
def test_block_in_which_a_foreign_process_runs_is_not_taken_and_leaves_no_lock_file(tmp_path: Path) -> None:
    with bystander(BASE + 5) as process:
        block = take_block(BASE, tmp_path)
        assert (block.base, process.poll()) == (BASE + BLOCK_SIZE, None)
        assert [file.name for file in tmp_path.iterdir()] == [f"uids-{BASE + BLOCK_SIZE}.lock"]
        block.release()
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_lock_file_that_was_never_marked_lets_nobody_be_killed(tmp_path: Path) -> None:
    """Its maker died before it had looked whether the block is free."""
    (tmp_path / f"uids-{BASE}.lock").touch()
    with bystander(BASE + 5) as process:
        block = take_block(BASE, tmp_path)
        assert (block.base, process.poll()) == (BASE + BLOCK_SIZE, None)
        block.release()


@needs_root
def test_nobody_below_the_least_uid_is_killed(tmp_path: Path) -> None:
    """Nothing but our own process runs in this range."""
    with bystander(50_001) as process:
        with pytest.raises(NoFreeUids, match="nothing was killed"):
            kill_all_of(range(50_000, 50_000 + BLOCK_SIZE))
        (tmp_path / "uids-50000.lock").write_text("taken\n")
        uids.clean_abandoned(lambda block: pytest.fail(f"{block.base} is swept"), tmp_path)
        assert process.poll() is None


def test_uids_of_users_and_of_containers_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = [("alice", BASE + 7, 1), ("containers", BASE + BLOCK_SIZE - 1, BLOCK_SIZE + 1), ("bob", 1000, 1)]
    monkeypatch.setattr(uids, "_accounts", lambda: iter(accounts))
    block = take_block(BASE, tmp_path)
    assert block.base == BASE + 2 * BLOCK_SIZE
    block.release()
    assert list(tmp_path.iterdir()) == []


def test_accounts_are_those_of_the_machine() -> None:
    assert ("root in /etc/passwd", 0, 1) in uids._accounts()


def test_bases_outside_of_the_bounds_are_refused_without_a_lock_file(tmp_path: Path) -> None:
    for base in (99_999 - uids.BLOCKS * BLOCK_SIZE, 2**32 - BLOCK_SIZE):
        with pytest.raises(NoFreeUids, match="are not between 100000 and"):
            take_block(base, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sweep_that_fails_keeps_the_mark_for_the_next_one(tmp_path: Path) -> None:
    take_block(BASE, tmp_path).leave()

    def fail(block: uids.UidBlock) -> None:
        raise NoFreeUids("processes do not die")

    uids.clean_abandoned(fail, tmp_path)
    swept: list[int] = []
    uids.clean_abandoned(lambda block: swept.append(block.base), tmp_path)
    uids.clean_abandoned(lambda block: swept.append(block.base), tmp_path)
    assert (swept, list(tmp_path.iterdir())) == ([BASE], [])


def test_base_beyond_the_user_namespace_moves_into_it() -> None:
    assert mapped_base(DEFAULT_BASE, "         0          0 4294967295\n") == DEFAULT_BASE
    assert mapped_base(DEFAULT_BASE, "0 1879048192 65536\n") == 32768  # a pod with hostUsers: false
    assert mapped_base(40000, "0 1879048192 65536\n") == 40000
    assert (
        mapped_base(DEFAULT_BASE, "0 1000 1\n") is None
    )  # `unshare --map-root-user`: the half of that would be everybody's root
    assert mapped_base(DEFAULT_BASE, "0 1000 2000\n") is None
