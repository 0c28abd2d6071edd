"""EXEC_REDIS: the URL of one server, or of several that are one queue.

    redis://a:6379/0                                  one server
    redis://a:6379/0,redis://b:6379/0                 two servers, each a shard of the queue
    redis://a:6379/0#one,redis://10.0.0.2:6379/0#two  with names of their own
    redis://a:6379/0,redis://b:6379/0?former=1        the second one gets no new calls: it is to be removed
    redis+cluster://a:6379,b:6379/?shards=3           a Redis Cluster or Valkey Cluster, found by any of these servers; three
                                                      shards, on as many primaries. rediss+cluster:// with TLS

A shard's name decides which calls it gets, so every gateway must know it by the same name, in any order. It is the address and
the database, or what follows the `#`. The shards of a cluster are `cluster/0`, `cluster/1`, and so on.
"""

import re
from binascii import crc_hqx
from functools import cache
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

SLOTS = 16_384  # of a Redis Cluster
MOST_SHARDS = 1000
NEAR = 32  # slots
GOLDEN = 0.6180339887498949


class ShardUrl(NamedTuple):
    url: str  # of the server alone
    name: str
    former: bool = False
    tag: str = ""  # in a cluster: of all keys of the shard


def split(urls: str) -> list[str]:
    """A password may contain a comma, so one ends a URL only where the next URL begins."""
    return re.split(r"\s*,\s*(?=[a-z+]+://)", urls.strip().rstrip(","))


def is_several(urls: str) -> bool:
    return len(split(urls)) > 1 or "+cluster://" in urls


def where(url: str) -> str:
    """The server's address, without the password."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    if parts.scheme.endswith("+cluster"):
        return parts.netloc.rpartition("@")[2]
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def slot_of(tag: str) -> int:
    """The slot of all keys with this hash tag, in a Redis Cluster."""
    return crc_hqx(tag.encode(), 0) % SLOTS


@cache
def tag_of(number: int) -> str:
    """The hash tag of a cluster's shard. Every further one falls into a large gap between the slots of those before, so shards
    are on different primaries if each has an equal range of slots. It does not depend on how many shards there are."""
    wanted = int((number + 1) * GOLDEN % 1 * SLOTS)
    return next(tag for tag in map(str, range(SLOTS)) if abs(slot_of(tag) - wanted) <= NEAR)


def read_urls(urls: str) -> list[ShardUrl]:
    """
    Raises:
        ValueError: a URL is invalid, two shards have the same name, or none would get calls.
    """
    shards = [shard for url in split(urls) for shard in _read(url)]
    names = [shard.name for shard in shards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is named twice")
    if all(shard.former for shard in shards):
        raise ValueError("every server is marked as former; none would get calls")
    return shards


def _read(url: str) -> list[ShardUrl]:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    former, shards = query.pop("former", "") not in ("", "0"), query.pop("shards", "")
    bare = parts._replace(query=urlencode(query), fragment="").geturl() if former or shards or parts.fragment else url
    if parts.scheme.endswith("+cluster"):
        if parts.path.strip("/") not in ("", "0"):
            raise ValueError(f"a Redis Cluster has the database 0 only, not {parts.path.strip('/')}")
        if not shards.isdecimal() or not 1 <= int(shards) <= MOST_SHARDS:
            raise ValueError(f"{where(url)} needs the number of shards, at least one per primary: ?shards=3")
        name = parts.fragment or "cluster"
        return [ShardUrl(bare, f"{name}/{number}", former, tag_of(number)) for number in range(int(shards))]
    if shards:
        raise ValueError("shards= is of redis+cluster:// and rediss+cluster://; name several servers by several URLs")
    database = "" if parts.scheme == "unix" else parts.path if parts.path.strip("/") else "/0"
    return [ShardUrl(bare, parts.fragment or f"{where(url)}{database}", former)]
