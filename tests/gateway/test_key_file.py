"""The key file, and the command that changes it."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from exec_service.config import ConfigError
from exec_service.tenants.accounts import LimitName
from exec_service.tenants.keys import Keys, add_key, hash_of, read_keys
from exec_wire.messages.calls import Limits


def test_the_file_holds_hashes_and_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secret, entry = add_key(file, "lab", weight=2)
    assert re.fullmatch(r"exs_[\w-]{43}", secret)
    assert secret not in file.read_text() and secret[4:] not in file.read_text()
    assert hash_of(secret) == entry.hash and entry.hash.startswith(f"sha256:{entry.id}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    add_key(file, "lab")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert read_keys(file).allowance("lab").weight == 2, "a second key leaves the tenant's allowance as it is"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"keys": []}', "no keys; make one: exec-service keys add"),
        ("", "not a valid key file"),
        ('{"keys": [{"id": "a", "hash": "secret", "tenant": "t"}]}', r"\$\.keys\[0\]\.hash"),
        ('{"keys": [], "tenants": {"t": {"wait": 1}}}', "wait"),
        ('{"keys": [], "tenants": {"t": {"max_limits": {"memory": 1}}}}', "max_limits"),
        (None, "No such file"),
    ],
)
def test_an_invalid_file_stops_the_start_and_names_the_reason(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "keys.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        Keys(file)


def test_maxima_can_be_set_for_every_limit() -> None:
    assert get_args(LimitName) == Limits.__struct_fields__


def keys_command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "exec_service", "keys", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env={name: value for name, value in os.environ.items() if name != "EXEC_KEYS"} | environ,
    )


def test_the_command_adds_lists_and_removes(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    added = keys_command("add", "--file", file, "--tenant", "lab", "--weight", "2", "--max-limit", "memory_mb=256")
    assert added.returncode == 0 and re.fullmatch(r"exs_[\w-]{43}\n", added.stdout)
    assert "memory_mb 512" in added.stderr and "EXEC_API_KEY" in added.stderr
    listed = keys_command("list", EXEC_KEYS=file)
    assert "lab" in listed.stdout and '"weight":2.0' in listed.stdout and added.stdout.strip() not in listed.stdout
    id = listed.stdout.split()[0]
    assert keys_command("remove", "--file", file, "nope").returncode == 2
    assert f"removed key {id}" in keys_command("remove", "--file", file, id).stderr
    assert json.loads(Path(file).read_text())["keys"] == []
    wrong = keys_command("add", "--file", file, "--tenant", "lab", "--max-limit", "memory=1")
    assert wrong.returncode == 2 and "memory" in wrong.stderr and not wrong.stdout


def test_the_command_makes_keys_for_operators_and_lists_them_as_such(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    for arguments in (["--tenant", "lab"], ["--tenant", "ops", "--operator"]):
        assert keys_command("add", "--file", file, *arguments).returncode == 0
    lab, ops = keys_command("list", "--file", file).stdout.splitlines()
    assert ops.endswith("operator") and "operator" not in lab
    entries = json.loads(Path(file).read_text())["keys"]
    assert ["operator" in entry for entry in entries] == [False, True]  # older gateways read a file without it
