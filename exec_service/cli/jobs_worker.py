"""`exec-service jobs-worker`: runs the chunks of bulk jobs in a cluster."""

import argparse

from exec_service.cli.common import Commands, add_redis_argument, read_config
from exec_service.config import JobsWorkerConfig


def add(commands: Commands) -> None:
    parser = commands.add_parser("jobs-worker", help="run the chunks of bulk jobs (Celery) through a gateway")
    parser.add_argument("--jobs-dir", metavar="DIR", help="folder of bulk jobs, shared with the gateways")
    parser.add_argument("--gateway", metavar="URL", help="the gateway that runs the items (default http://127.0.0.1:8080)")
    parser.add_argument("--chunks", type=int, help="chunks that run at the same time (default 2)")
    parser.add_argument("--at-once", type=int, help="items of one chunk that are in flight at once (default 32)")
    add_redis_argument(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    given = {"jobs_gateway": options.gateway, "jobs_chunks": options.chunks, "jobs_at_once": options.at_once}
    config = read_config(JobsWorkerConfig, options, "redis", "jobs_dir", **given)
    from exec_service.jobs.celery_tasks import work

    return work(config)
