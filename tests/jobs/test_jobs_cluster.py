"""Bulk jobs in a cluster of real processes: Celery on a real server, programs in real sandboxes, and parts that are killed."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import bulk_harness
from gateway_harness import until
from jobs_harness import calls, jobs_running
from redis_harness import need_redis
from sandbox_harness import need_sandbox

from exec_service.config import GatewayConfig, JobsWorkerConfig
from exec_service.jobs.celery_tasks import CeleryChunkQueue
from loadtest.support.processes import ROOT, Part, environment
from loadtest.support.redis_server import RedisServer


def test_every_item_is_done_once_though_each_part_is_killed(tmp_path: Path) -> None:
    need_redis()
    need_sandbox()
    # The last items take so long that the job still runs when a busy machine notices that the last part is to be killed.
    results = bulk_harness.run(240, 8, "import time; time.sleep(0.15); print({})", tmp_path, 300)
    assert results.once and results.killed == ["worker", "jobs worker", "gateway"], results
    assert results.calls > 50 and not results.errors, results


async def test_stopped_jobs_worker_leaves_its_chunk_with_what_it_has(tmp_path: Path) -> None:
    need_redis()
    with RedisServer() as redis:
        async with jobs_running(tmp_path, run=False) as jobs:
            jobs.service.gateway.keep_jobs(CeleryChunkQueue(redis.url))
            with Part.jobs_worker(redis.url, "--gateway", jobs.service.url, jobs_dir=jobs.store.folder) as part:
                job = await jobs.submit(calls(*["say x"] * 5, "hold"))
                await until(lambda: any(heartbeat.done == 5 for heartbeat in jobs.store.running(job.id).values()), 10)
                part.kill(signal.SIGTERM)
                assert await asyncio.to_thread(part.wait, 10) == 0
            assert (jobs.store.partly_done(job.id), jobs.store.running(job.id)) == ({1: 5}, {})


async def test_chunks_go_through_the_server_of_bulk_jobs_and_need_no_other(tmp_path: Path) -> None:
    need_redis()
    with RedisServer() as redis:
        of_calls, own = "redis://127.0.0.1:1/0", redis.url
        async with jobs_running(tmp_path, run=False) as jobs:
            config = GatewayConfig(redis=of_calls, jobs_redis=own)
            jobs.service.gateway.keep_jobs(CeleryChunkQueue(config.jobs_broker))
            settings = {"jobs_dir": jobs.store.folder, "jobs_redis": own}
            with Part.jobs_worker(of_calls, "--gateway", jobs.service.url, **settings):
                job = await jobs.submit(calls(*["say x"] * 5))
                await until(lambda: jobs.store.is_done(job.id, 1), 60)


def test_bulk_jobs_use_the_queue_of_calls_if_they_have_none_of_their_own() -> None:
    assert GatewayConfig(redis="redis://one").jobs_broker == "redis://one"
    assert JobsWorkerConfig(redis="redis://one", jobs_dir="/jobs").jobs_broker == "redis://one"
    assert JobsWorkerConfig(jobs_redis="redis://two", jobs_dir="/jobs").jobs_broker == "redis://two"


def test_jobs_worker_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "exec_service", "jobs-worker"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment({}))
    assert ended.returncode == 2 and "--redis and --jobs-dir" in ended.stderr
