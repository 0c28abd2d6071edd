"""`exec-service keys`: add, list and remove API keys."""

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import get_args

from exec_service.cli.common import Commands
from exec_service.config import ConfigError
from exec_wire import Limits, encode_json


def add(commands: Commands) -> None:
    actions = commands.add_parser("keys", help="add, list and remove API keys").add_subparsers(required=True, metavar="ACTION")
    file = argparse.ArgumentParser(add_help=False)
    known = os.environ.get("EXEC_KEYS")
    file.add_argument(
        "--file", type=Path, required=not known, default=known, help="the file of keys (default: $EXEC_KEYS); holds only hashes"
    )
    _add_arguments(actions.add_parser("add", parents=[file], help="make a key and print it; it cannot be shown again"))

    shown = actions.add_parser("list", parents=[file], help="show tenants and the ids of their keys")
    shown.set_defaults(run=list_keys)

    remove = actions.add_parser("remove", parents=[file], help="revoke keys; running services notice within a second")
    remove.add_argument("id", nargs="+", help="the id that `list` shows")
    remove.set_defaults(run=remove_keys)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", required=True, help="the tenant that the key belongs to; a tenant may have several keys")
    parser.add_argument("--weight", type=float, help="the tenant's share when several wait (default 1)")
    parser.add_argument("--max-calls", type=int, metavar="N", help="calls in flight; 0: no limit (the default)")
    parser.add_argument("--calls-per-minute", type=int, metavar="N", help="0: no limit (the default)")
    parser.add_argument("--max-priority", choices=["train", "eval", "bulk"], help="a call that asks for more gets this one")
    parser.add_argument(
        "--max-limit", action="append", metavar="NAME=VALUE", help="the most a program may ask for, such as memory_mb=1024"
    )
    parser.add_argument("--operator", action="store_true", help="this key also sees the metrics and figures of all tenants")
    parser.set_defaults(run=add_key)


def add_key(options: argparse.Namespace) -> None:
    from exec_service.tenants import keys

    limits = read_max_limits(options.max_limit)
    names = ("operator", "weight", "max_calls", "calls_per_minute", "max_priority")
    given = {name: getattr(options, name) for name in names}
    secret, entry = keys.add_key(options.file, options.tenant, **given, max_limits=limits)
    print(secret)
    for name, most in (limits or {}).items():
        if most < (usual := getattr(Limits(), name)):
            print(f"The default of a call is {name} {usual:g}; callers with this key have to set less.", file=sys.stderr)
    print(
        f"Key {entry.id} of tenant {entry.tenant!r} is in {options.file} as a hash; the key itself is shown only now, keep it. "
        "Callers set EXEC_API_KEY, or send `Authorization: Bearer KEY`.",
        file=sys.stderr,
    )


def read_max_limits(given: list[str] | None) -> dict[str, float] | None:
    from exec_service.tenants.accounts import LimitName

    if given is None:
        return None
    names, limits = get_args(LimitName), dict[str, float]()
    for text in given:
        name, _, value = text.partition("=")
        with contextlib.suppress(ValueError):
            if name in names and float(value) > 0:
                limits[name] = float(value)
                continue
        raise ConfigError(f"--max-limit {text} is not allowed; NAME=VALUE is, a number above 0 for {', '.join(names)}")
    return limits


def list_keys(options: argparse.Namespace) -> None:
    from exec_service.tenants.keys import read_keys

    content = read_keys(options.file)
    for entry in content.keys:
        allowance = encode_json(content.allowance(entry.tenant)).decode()
        print(f"{entry.id}  {entry.created:10}  {entry.tenant}  {allowance}{'  operator' if entry.operator else ''}")


def remove_keys(options: argparse.Namespace) -> None:
    from exec_service.tenants.keys import remove_key

    for id in options.id:
        entry = remove_key(options.file, id)
        print(f"removed key {entry.id} of tenant {entry.tenant!r}", file=sys.stderr)
