"""EXEC_REDIS: the URL of one server, or of several that are one queue.

    redis://a:6379/0                                  one server
    redis://a:6379/0,redis://b:6379/0                 two servers, each a shard of the queue
    redis://a:6379/0#one,redis://10.0.0.2:6379/0#two  with names of their own
    redis://a:6379/0,redis://b:6379/0?former=1        the second one gets no new calls: it is to be removed

A shard's name decides which calls it gets, so every gateway must know it by the same name, in any order. It is the address and
the database, or what follows the `#`.
"""

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

FORMER = "former"


class ShardUrl(NamedTuple):
    url: str  # of the server alone
    name: str
    former: bool = False


def split(urls: str) -> list[str]:
    """A password may contain a comma, so one ends a URL only where the next URL begins."""
    return re.split(r"\s*,\s*(?=[a-z+]+://)", urls.strip().rstrip(","))


def where(url: str) -> str:
    """The server's address, without the password."""
    parts = urlsplit(url)
    return f"unix://{parts.path}" if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def read_urls(urls: str) -> list[ShardUrl]:
    """
    Raises:
        ValueError: two shards have the same name, or none would get calls.
    """
    shards = [_read(url) for url in split(urls)]
    names = [shard.name for shard in shards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is named twice")
    if all(shard.former for shard in shards):
        raise ValueError("every server is marked as former; none would get calls")
    return shards


def _read(url: str) -> ShardUrl:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    former = query.pop(FORMER, "") not in ("", "0")
    bare = parts._replace(query=urlencode(query), fragment="").geturl() if former or parts.fragment else url
    database = "" if parts.scheme == "unix" else parts.path if parts.path.strip("/") else "/0"
    return ShardUrl(bare, parts.fragment or f"{where(url)}{database}", former)
