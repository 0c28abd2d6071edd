"""What a runner leaves when it goes: nothing, whatever programs left in its folder."""

import os
import subprocess
from pathlib import Path

import pytest

from worker.sandbox.runner_host import remove_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runner"
    (folder / "scratch" / "slot0" / "tmp").mkdir(parents=True)
    (folder / "jail.cfg").touch()
    return folder


def test_folder_with_very_deep_folders_is_removed(folder: Path) -> None:
    before = os.getcwd()  # noqa: PTH109
    try:
        os.chdir(folder / "scratch" / "slot0" / "tmp")
        for _ in range(3000):
            os.mkdir("d")  # noqa: PTH102
            os.chdir("d")
    finally:
        os.chdir(before)
    remove_folder(folder)
    assert not folder.exists()


def test_links_are_removed_and_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (folder / "scratch" / "slot0" / "link").symlink_to(tmp_path / "kept")
    (folder / "scratch" / "slot0" / "locked").mkdir(mode=0)
    remove_folder(folder)
    assert not folder.exists()
    assert (tmp_path / "kept" / "file").exists()


def test_folder_in_which_nothing_was_made_is_removed(tmp_path: Path) -> None:
    (tmp_path / "runner").mkdir()
    remove_folder(tmp_path / "runner")
    assert not (tmp_path / "runner").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_what_is_mounted_below_is_not_emptied(folder: Path, tmp_path: Path) -> None:
    shown, place = tmp_path / "shown", folder / "scratch" / "mounted"
    shown.mkdir()
    (shown / "file").touch()
    place.mkdir()
    subprocess.run(["mount", "--bind", str(shown), str(place)], check=True)
    try:
        with pytest.raises(OSError, match="busy"):
            remove_folder(folder)
        assert (shown / "file").exists()
    finally:
        subprocess.run(["umount", str(place)], check=True)
