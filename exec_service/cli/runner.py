"""`exec-service runner`: the privileged half of a worker, in a process or container of its own."""

import argparse
from pathlib import Path

from exec_service.cli.common import Commands


def add(commands: Commands) -> None:
    from worker.config import default_packages
    from worker.sandbox import runner_limits

    parser = commands.add_parser(
        "runner",
        help="start the privileged half of a worker in a process of its own",
        description="The privileged half of a worker. It builds the sandboxes and does not trust the worker that connects: "
        "these options set the most that a worker may ask for.",
    )
    parser.add_argument("--socket", type=Path, required=True, help="socket to listen on (the worker's EXEC_RUNNER_SOCKET)")
    parser.add_argument("--user-namespace", action="store_true", help="exit unless root here is another user on the machine")
    runner_limits.add_arguments(parser, Path(default_packages()))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from worker.sandbox import runner
    from worker.sandbox.runner_limits import RunnerOptions

    arguments = ["--socket", str(options.socket), *RunnerOptions.read(options).arguments()]
    runner.main([*arguments, *(["--user-namespace"] if options.user_namespace else [])])
    return 0
