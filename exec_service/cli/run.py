"""`exec-service run`: run one program, here or at a running service, and exit as it did."""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from exec_service.cli import common
from exec_service.config import ConfigError, read_environment
from exec_wire import Call, Limits, Result, encode_json, verdict


def add(commands: common.Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run one program and show its output",
        description="Runs one program and shows its output. The program reads this command's standard input, unless that is a "
        "terminal or holds the program itself.",
    )
    parser.add_argument("file", nargs="?", help="a file, or - for standard input")
    parser.add_argument("-c", dest="code", help="the program itself")
    parser.add_argument("--url", help="a running service (default: a sandbox for this one program)")
    parser.add_argument("--language", default="python", help="the program's language (default python); see docs/client.md")
    parser.add_argument("--wall", type=seconds, default=10.0, metavar="SECONDS", help="time limit (default 10)")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    common.add_insecure_argument(parser)
    parser.set_defaults(run=run)


def seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= 3600:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number of seconds, more than 0 and at most 3600, is")


def run(options: argparse.Namespace) -> int:
    if (options.file is None) == (options.code is None):
        return common.fail("give either a file (or -) or -c CODE", common.EXIT_USAGE)
    try:
        code = options.code
        if code is None:
            code = sys.stdin.read() if options.file == "-" else Path(options.file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        return common.fail(f"{options.file}: {error}", common.EXIT_USAGE)
    try:
        stdin = "" if options.file == "-" or sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        return common.fail(f"standard input cannot be passed on, it has to be text: {error}", common.EXIT_USAGE)
    limits = Limits(wall_s=options.wall)
    call = Call(code=code, stdin=stdin, language=options.language, limits=limits, deadline_s=options.wall + 60)
    return run_call(call, options)


def run_call(call: Call, options: argparse.Namespace) -> int:
    from exec_client import CallerError, ExecError, Unavailable
    from worker.sandbox.runner_client import SandboxUnavailable

    try:
        work = _run_remotely(call, options.url) if options.url else _run_here(call, common.weakest_tier(options))
        result = common.run_loop(work)
    except Unavailable as error:
        if error.result is None:
            return common.fail(str(error), common.EXIT_UNAVAILABLE)
        result = error.result
    except CallerError as error:
        return common.fail(str(error), common.EXIT_USAGE)
    except (ExecError, SandboxUnavailable) as error:
        return common.fail(str(error), common.EXIT_UNAVAILABLE)
    except KeyboardInterrupt:
        return common.EXIT_INTERRUPTED
    return show(result, as_json=options.json)


async def _run_remotely(call: Call, url: str) -> Result:
    from exec_client import AsyncClient

    async with AsyncClient(url) as client:
        return await client.run(call)


async def _run_here(call: Call, min_tier: str) -> Result:
    from worker.config import WorkerConfig
    from worker.pool import Pool, ZygoteLost
    from worker.profiles import ProfileChoice

    profiles = read_environment(WorkerConfig, os.environ).profiles
    profile = ProfileChoice(profiles).choose(call.code)
    config = read_environment(WorkerConfig, os.environ, slots=1, profiles={profile: profiles[profile]}, min_tier=min_tier)
    async with Pool(config) as pool:
        if call.language not in pool.languages:
            raise ConfigError(f"--language {call.language} is not installed here; installed: {', '.join(pool.languages)}")
        await pool.wait_ready()
        try:
            return await pool.run(call, pool.take_slot(), call.deadline_s)
        except ZygoteLost:
            return verdict("worker_lost", error="the interpreter died while it ran the program")


def show(result: Result, *, as_json: bool) -> int:
    """Print the program's output; return its exit code, as if it had run here."""
    if as_json:
        print(encode_json(result).decode())
    else:
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        if result.status not in ("ok", "error"):
            print(f"exec-service: {result.status} (blame: {result.blame}) {result.error}".rstrip(), file=sys.stderr)
    if result.blame == "infra":
        return common.EXIT_INFRA
    if result.blame == "client":
        return common.EXIT_USAGE
    if result.exit_code is not None:
        return result.exit_code
    return 128 + result.signal if result.signal is not None else common.EXIT_LIMIT
