"""The parser of the command line, and the exit code of every command."""

import argparse
import sys
from typing import Any

from exec_service.cli import doctor, gateway, head, jobs, jobs_worker, keys, run, runner, up, worker
from exec_service.cli.common import EXIT_UNAVAILABLE, EXIT_USAGE, fail
from exec_service.config import ConfigError, package_version

COMMANDS = (up, doctor, runner, gateway, worker, head, jobs_worker, keys, jobs, run)
EPILOG = (
    "For settings in EXEC_* variables see docs/configuration.md. Exit codes: 0 success, 2 wrong usage, 69 not available here, "
    "70 a task of the service kept failing, 75 infrastructure failure (try again); `run` exits as its program did."
)


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    try:
        sys.exit(options.run(options))
    except ConfigError as error:
        sys.exit(fail(str(error), EXIT_USAGE))
    except ModuleNotFoundError as error:
        sys.exit(fail(missing_extra(error), EXIT_UNAVAILABLE))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="exec-service", description="Runs programs in sandboxes, for agentic RL.", epilog=EPILOG
    )
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


class Version(argparse.Action):
    """As argparse's own, but reads the version only when asked: `importlib.metadata` is slow to load."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"exec-service {package_version()}")
        parser.exit()


def missing_extra(error: ModuleNotFoundError) -> str:
    """The message that names the extra to install. Raises `error` again if the missing module is one of this repository."""
    module = (error.name or "").partition(".")[0]
    if not module or module in ("exec_service", "exec_client", "exec_wire", "worker"):
        raise error
    extra = "otel" if module == "opentelemetry" else "server"
    return f"the Python module {module!r} is not installed; this command needs: pip install 'exec-service[{extra}]'"
