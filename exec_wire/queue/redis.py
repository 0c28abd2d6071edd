"""The job queue on Redis or Valkey streams: any number of gateways and workers, one primary (7.0 or newer), or several that are
one queue (`exec_wire.queue.shards`).

    x1:jobs:{class}       stream, group `workers`   released calls: one entry each, see below
    x1:jobs@{worker}      stream, 120 s             jobs for one worker: the same entries, deleted once read
    x1:reply@{gateway}    stream, 60 s, renewed     answers, see below; only the gateway itself creates it
    x1:worker:{id}        string, 6 s, renewed      `WorkerInfo` as JSON        x1:workers   set of ids
    x1:gateway:{id}       string, 6 s, renewed      `GatewayInfo` as JSON       x1:gateways  set of ids
    x1:idem:{digest}      string, 120 s             a fingerprint of 16 bytes, then a packed `Result`; see `record_name`
    x1:cancel             channel (with the number of the database)   ids of jobs that their workers have to kill
    x1:handed_back        channel (likewise)        jobs were handed back: workers that wait for jobs look for expired leases
    x1:cancelled:{job}    string, 30 s              a worker whose subscription broke looks for those of its jobs
    x1:cancel@gateways    channel (likewise)                          an `Ask` to all gateways, by tags
    x1:cancel@requests    channel (likewise)                          an `Ask` to all gateways, by request: see `ask_others`
    x1:cancel@{gateway}   channel (likewise)                          replies of other gateways to an `Ask` of this one

Every name begins with x and `LAYOUT_VERSION`. In a Redis Cluster the hash tag of the shard follows (`x1:{9}:jobs:python`), so
that one primary has all keys of a script; scripts name them all.

Fields of an entry: v = `WIRE_VERSION`, id = of the job, to = the gateway that waits for its answer, j = the packed `Job`. Of an
entry with answers: v, id = of all its jobs, separated by spaces, a = the packed `Answer`s. A reader that cannot decode the
packed part can still handle the entry by the other fields.

How this implementation keeps the rules of `exec_wire.queue.protocol`:

  Take       One script looks for expired leases and then for new jobs; after a look that found less than it wanted the worker
             blocks until a job arrives. A blocking read counts per stream; the worker hands back surplus jobs at once.
  Lease      An entry's idle time in the group. To renew, a worker claims the entry for itself (XCLAIM) if it still holds it.
  Hold       To hand back, a worker claims the entry for nobody and sets a long idle time; the id stays, so the gateway still
             finds it. A message tells the workers; those that wait for jobs end their blocking read.
  Starts     The group's delivery counter. XREADGROUP counts every new job. When a worker takes an expired job to hold it, the
             counter stays as it was; the worker sets it before the program starts. That is rare: a start costs no command.
  Answer     One script: XACK, XDEL, XADD NOMKSTREAM, SET. While all slots of a worker are busy, an answer waits up to 1 ms for
             others to travel with it, and it travels with the next take; a gateway that gets answers so often that they come
             together waits up to 1 ms before it reads again. If the gateway's stream does not exist, the worker retries for a
             while: after a FLUSHALL the gateway creates its stream again.
  Unreadable A worker hands an entry of a newer version to the consumer `version N`; only workers that read N look there for
             expired leases.
  Time       The primary stamps entry ids and measures by the same clock how long an entry has waited.
  Memory     Once a script has written, Redis permits its further writes although `maxmemory` is reached. Publishing does not
             use that; scripts that free memory or keep a lease do (`even_if_full`).

Scripts (`scripts/*.lua`) are sent with their text (EVAL): a restarted server knows no hashes, and the text is small beside the
payloads.
"""

from exec_wire.queue.protocol import GatewayQueue, WorkerQueue
from exec_wire.queue.redis_entries import Address
from exec_wire.queue.redis_gateway import RedisGatewayEnd
from exec_wire.queue.redis_worker import RedisWorkerEnd
from exec_wire.queue.sharded_gateway import ShardedGatewayEnd
from exec_wire.queue.sharded_worker import ShardedWorkerEnd
from exec_wire.queue.urls import read_urls, where


class RedisQueue:
    """`gateway()` and `worker()` open the two ends. `urls`: of one server, or of several that are one queue (`urls`).

    Raises:
        ValueError: a URL is invalid.
    """

    def __init__(self, urls: str) -> None:
        shards = read_urls(urls)
        self._addresses = {shard.name: Address(shard.url, shard.tag) for shard in shards}
        self._former = [shard.name for shard in shards if shard.former]
        self.where = ", ".join(dict.fromkeys(where(shard.url) for shard in shards))

    def gateway(self, name: str) -> GatewayQueue:
        addresses = self._addresses
        if len(addresses) == 1:
            return RedisGatewayEnd(next(iter(addresses.values())), name)
        ends = {shard: RedisGatewayEnd(address, name, list(addresses)) for shard, address in addresses.items()}
        return ShardedGatewayEnd(name, ends, self._former)

    def worker(self, name: str) -> WorkerQueue:
        ends = {shard: RedisWorkerEnd(address, name) for shard, address in self._addresses.items()}
        return next(iter(ends.values())) if len(ends) == 1 else ShardedWorkerEnd(ends)
