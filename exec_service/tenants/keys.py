"""API keys in a file, each of one tenant. The file holds hashes; the keys themselves are not stored.

    {"keys": [{"id": "1f0a93c2", "hash": "sha256:…", "tenant": "lab", "created": "2026-01-31"}],
     "tenants": {"lab": {"weight": 2, "max_calls": 20000, "calls_per_minute": 60000,
                         "max_limits": {"memory_mb": 1024}, "max_priority": "eval"}}}

A key is 256 random bits, so one round of SHA-256 is enough: a dictionary attack is useless. A running gateway checks the file
every `REREAD_S`; if it cannot be read, the gateway logs that and keeps the keys that it has.
"""

import asyncio
import base64
import binascii
import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
from msgspec import Meta, Struct, field

from exec_service.config import ConfigError
from exec_service.refusals import Refusal
from exec_service.tenants.accounts import Account, Allowance
from exec_wire.messages.calls import GivenLabel
from exec_wire.queue.protocol import GatewayInfo, TenantUse

log = logging.getLogger("exec_service.tenants.keys")

REREAD_S = 1.0
PREFIX = "exs_"  # so that people, and scanners for leaked secrets, recognise a key
MAX_HEADER = 1024
NO_LIMITS = Allowance()


class KeyEntry(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    id: GivenLabel  # names a key without revealing it: the beginning of its hash
    hash: Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]
    tenant: GivenLabel
    created: str = ""
    operator: bool = False  # may see the statistics of all tenants


class KeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[KeyEntry] = field(default_factory=list)
    tenants: dict[GivenLabel, Allowance] = field(default_factory=dict)

    def allowance(self, tenant: str) -> Allowance:
        return self.tenants.get(tenant, NO_LIMITS)


class Keys:
    """The keys of a running gateway, and the accounts of their tenants."""

    def __init__(self, path: Path, retry_after_max_s: float = 60.0) -> None:
        self._path, self._retry_after_max_s = path, retry_after_max_s
        self._state: tuple[int, ...] | None = None  # of the file when it was read
        self._content = KeyFile()
        self._entries: dict[str, KeyEntry] = {}  # by hash
        self._accounts: dict[str, Account] = {}
        self._others: list[GatewayInfo] = []
        self._reread()
        if not self._entries:
            raise ConfigError(f"{path} has no keys; make one: exec-service keys add --file {path} --tenant NAME")

    def account(self, authorization: str) -> Account:
        """The account of the key in this header (in gRPC: metadata)."""
        entry = self._entries.get(hash_of(secret_of(authorization)))
        if entry is None:
            raise Refusal("unauthenticated", "unknown API key; it may have been removed")
        return self._account(entry.tenant)

    def is_operator(self, authorization: str) -> bool:
        entry = self._entries.get(hash_of(secret_of(authorization)))
        return entry is not None and entry.operator

    def account_of(self, tenant: str) -> Account:
        """For bulk jobs, which call as their tenant while the tenant has a key."""
        if all(entry.tenant != tenant for entry in self._entries.values()):
            raise Refusal("unauthenticated", "the tenant of this job no longer has a key")
        return self._account(tenant)

    def weight(self, tenant: str) -> float:
        """Its share of the slots when several tenants wait."""
        return self._content.allowance(tenant).weight

    def use(self) -> dict[str, TenantUse]:
        """What tenants use of their limits at this gateway."""
        return {tenant: use for tenant, account in self._accounts.items() if (use := account.use()) is not None}

    def learn(self, others: list[GatewayInfo]) -> None:
        """Take over what tenants use at the other gateways."""
        self._others = others
        for account in self._accounts.values():
            account.learn(others)

    async def reread_forever(self) -> NoReturn:
        while True:
            await asyncio.sleep(REREAD_S)
            try:
                self._reread()
            except ConfigError as error:
                log.error("cannot read the key file; keeping the keys read before", extra={"reason": str(error)})

    def _reread(self) -> None:
        state = state_of(self._path)
        if state == self._state:
            return
        self._state = state  # even if reading fails: log the error once, not every second
        self._content = read_keys(self._path)
        self._entries = {entry.hash: entry for entry in self._content.keys}
        for tenant, account in self._accounts.items():
            account.change(self._content.allowance(tenant))

    def _account(self, tenant: str) -> Account:
        if tenant not in self._accounts:
            account = self._accounts[tenant] = Account(tenant, self._content.allowance(tenant), self._retry_after_max_s)
            account.learn(self._others)
        return self._accounts[tenant]


def secret_of(authorization: str) -> str:
    """`Bearer KEY`; or Basic with the key as password, which clients send that can be given only a URL."""
    scheme, _, rest = authorization[:MAX_HEADER].partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
    raise Refusal("unauthenticated", "send the header `Authorization: Bearer KEY`")


def hash_of(secret: str) -> str:
    return "sha256:" + hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def state_of(path: Path) -> tuple[int, ...]:
    """Changes when the file is rewritten, replaced or removed, or a link to it changes."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_keys(path: Path) -> KeyFile:
    try:
        content = msgspec.json.decode(path.read_bytes(), type=KeyFile)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a valid key file: {error}") from None
    hashes = [entry.hash for entry in content.keys]
    if len(set(hashes)) < len(hashes):
        raise ConfigError(f"{path} contains a key twice; a key has one tenant")
    return content


def add_key(path: Path, tenant: str, *, operator: bool = False, **allowance: object) -> tuple[str, KeyEntry]:
    """Return a new key, which is not stored, and its entry. The given parts of the allowance replace the tenant's."""
    secret = PREFIX + secrets.token_urlsafe(32)
    hashed = hash_of(secret)
    entry = KeyEntry(hashed.partition(":")[2][:8], hashed, tenant, datetime.now(UTC).date().isoformat(), operator)
    with changing(path) as (content, write):
        before = msgspec.to_builtins(content.allowance(tenant))
        tenants = content.tenants | {tenant: before | {name: value for name, value in allowance.items() if value is not None}}
        write({"keys": [*content.keys, entry], "tenants": tenants})
    return secret, entry


def remove_key(path: Path, id: str) -> KeyEntry:
    with changing(path) as (content, write):
        found = [entry for entry in content.keys if entry.id == id]
        if not found:
            known = ", ".join(f"{entry.id} ({entry.tenant})" for entry in content.keys) or "none"
            raise ConfigError(f"{path} has no key {id!r}; known keys: {known}")
        write({"keys": [entry for entry in content.keys if entry not in found], "tenants": content.tenants})
    return found[0]


@contextlib.contextmanager
def changing(path: Path) -> Iterator[tuple[KeyFile, Callable[[object], None]]]:
    """Lock the file; yield its content (empty if there is no file) and a function that replaces it."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot change the key file {path}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield (read_keys(path) if path.exists() else KeyFile()), lambda content: _replace(path, content)
    finally:
        os.close(folder)


def _replace(path: Path, content: object) -> None:
    """Atomically: a gateway may read at any moment."""
    encoded = msgspec.json.encode(content)
    try:
        msgspec.json.decode(encoded, type=KeyFile)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as new:
            new.write(msgspec.json.format(encoded, indent=2) + b"\n")
            if path.exists():  # the service may run as another user than the one who adds keys
                old = path.stat()
                os.fchmod(new.fileno(), old.st_mode & 0o777)
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(new.fileno(), old.st_uid, old.st_gid)
    except OSError as error:
        raise ConfigError(f"cannot write beside {path}: {error.strerror}") from None
    Path(new.name).replace(path)
