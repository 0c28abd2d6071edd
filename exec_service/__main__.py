"""The command line. Reads the environment once, here."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from exec_service.api.info import package_version
from exec_wire import Call, Limits, Result, encode_json, verdict

if TYPE_CHECKING:
    from exec_service.config import GatewayConfig

T = TypeVar("T")

EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_INFRA = 2, 69, 75  # sysexits: unavailable, try again
EXIT_LIMIT, EXIT_INTERRUPTED = 124, 130  # as timeout(1) and a shell


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    try:
        sys.exit(options.run(options))
    except ModuleNotFoundError as error:
        sys.exit(fail(missing_extra(error), EXIT_UNAVAILABLE))


def missing_extra(error: ModuleNotFoundError) -> str:
    """In words, if it is a requirement of ours; else it is raised: a module of our own that is gone is a fault."""
    module = (error.name or "").partition(".")[0]
    if not module or module in ("exec_service", "exec_client", "exec_wire", "worker"):
        raise error
    extra = "otel" if module == "opentelemetry" else "server"
    return f"the Python module {module!r} is not installed; this command needs: pip install 'exec-service[{extra}]'"


def build_parser() -> argparse.ArgumentParser:
    from worker.config import default_packages
    from worker.sandbox import runner_options

    parser = argparse.ArgumentParser(
        prog="exec-service",
        description="Runs programs in sandboxes, for agentic RL.",
        epilog="Settings come from EXEC_* variables too, see docs/configuration.md. Exit codes: 0 all well, 2 wrong usage, "
        "69 not available here, 70 a task of ours kept failing, 75 our fault (try again); `run` ends as its program did.",
    )
    parser.add_argument("--version", action="version", version=f"exec-service {package_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="gateway and worker on this machine, nothing else needed")
    up.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    up.add_argument("--port", type=port, help="port to listen on (default 8080)")
    up.add_argument("--grpc-port", type=port, help="port for gRPC; 0: none (default 50051, or none if that is taken)")
    up.add_argument("--keys", metavar="FILE", help="ask every caller for a key of this file (see `exec-service keys`)")
    up.add_argument("--jobs-dir", metavar="DIR", help="folder of bulk jobs; without it there are none")
    up.add_argument("--slots", type=int, help="programs that run at the same time (default: three for every core)")
    up.add_argument(
        "--insecure", action="store_true", help="run programs even where there is no isolation (your own code only)"
    )
    up.set_defaults(run=run_up)

    doctor = commands.add_parser(
        "doctor",
        help="what works on this machine, what does not, and how to enable it",
        epilog="Exit codes: 0 the full sandbox (tier A or B), 1 a weaker one (C or D), 2 wrong usage, 69 no isolation.",
    )
    doctor.add_argument("--port", type=port, default=8080, help="the port to look at (default 8080)")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.set_defaults(run=run_doctor)

    runner = commands.add_parser(
        "runner",
        help="the privileged half of a worker, in a process or container of its own",
        description="The privileged half of a worker. It builds the sandboxes and does not trust the worker that joins it: "
        "these options alone say what a worker can have, and a worker can only ask for less.",
    )
    runner.add_argument("--socket", type=Path, required=True, help="where to listen for the worker (its EXEC_RUNNER_SOCKET)")
    runner.add_argument("--user-namespace", action="store_true", help="end unless our root is somebody else on the machine")
    runner_options.add_arguments(runner, Path(default_packages()))
    runner.set_defaults(run=run_runner)

    gateway = commands.add_parser("gateway", help="the doors alone, joined to workers by Redis")
    gateway.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    gateway.add_argument("--port", type=port, help="port to listen on (default 8080)")
    gateway.add_argument("--grpc-port", type=port, help="port for gRPC; 0: none (default 50051)")
    gateway.add_argument("--keys", metavar="FILE", help="ask every caller for a key of this file (see `exec-service keys`)")
    gateway.add_argument("--jobs-dir", metavar="DIR", help="folder of bulk jobs, shared with the jobs workers; else none")
    gateway.set_defaults(run=run_gateway)

    worker = commands.add_parser("worker", help="the sandboxes alone, joined to gateways by Redis")
    worker.add_argument("--slots", type=int, help="programs that run at the same time (default: three for every core)")
    worker.add_argument("--min-tier", choices="ABCDE", help="refuse to run programs in a weaker sandbox (default B)")
    worker.add_argument("--runtime", choices=("sandbox", "echo"), help="echo runs nothing, for benchmarks; needs --insecure")
    worker.add_argument("--insecure", action="store_true", help="run programs even where there is no isolation")
    worker.set_defaults(run=run_worker)

    jobs_worker = commands.add_parser("jobs-worker", help="runs the chunks of bulk jobs (Celery), through a gateway")
    jobs_worker.add_argument("--jobs-dir", metavar="DIR", help="folder of bulk jobs, shared with the gateways")
    jobs_worker.add_argument("--gateway", metavar="URL", help="the gateway that runs the items (default http://127.0.0.1:8080)")
    jobs_worker.add_argument("--chunks", type=int, help="chunks that are run at the same time (default 2)")
    jobs_worker.add_argument("--at-once", type=int, help="items of one chunk that are on their way at once (default 32)")
    jobs_worker.set_defaults(run=run_jobs_worker)

    for part in (gateway, worker, jobs_worker):
        part.add_argument(
            "--redis", metavar="URL", help="redis://, rediss:// or unix:// (or EXEC_REDIS, which ps does not show)"
        )
    for part in (gateway, worker):
        part.add_argument("--metrics-port", type=port, help="port for metrics and health (default: a free one)")
    up.add_argument("--metrics-port", type=port, help="port for metrics and health, for those who have no key (default: none)")

    add_keys_parser(commands.add_parser("keys", help="who may call: add, list and remove API keys"))

    add_jobs_parser(commands.add_parser("jobs", help="bulk jobs: submit, look, pause, cancel, fetch the results"))

    run = commands.add_parser(
        "run",
        help="run one program and show what it printed",
        description="Runs one program and shows what it printed. Its standard input is that of this command, unless that is a "
        "terminal or the program itself comes from there.",
    )
    run.add_argument("file", nargs="?", help="a file, or - for standard input")
    run.add_argument("-c", dest="code", help="the program itself")
    run.add_argument("--url", help="a running service; without it a sandbox is made for this one program")
    run.add_argument("--language", default="python", help="the program's language (default python); see docs/client.md")
    run.add_argument("--wall", type=seconds, default=10.0, metavar="SECONDS", help="time limit (default 10)")
    run.add_argument("--json", action="store_true", help="print the whole result as JSON")
    run.add_argument("--insecure", action="store_true", help="run it even where there is no isolation (your own code only)")
    run.set_defaults(run=run_program)
    return parser


def add_keys_parser(keys: argparse.ArgumentParser) -> None:
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    file = argparse.ArgumentParser(add_help=False)
    known = os.environ.get("EXEC_KEYS")
    file.add_argument(
        "--file", type=Path, required=not known, default=known, help="the file of keys (default: $EXEC_KEYS); holds only hashes"
    )

    add = actions.add_parser("add", parents=[file], help="make a key and print it; it cannot be shown again")
    add.add_argument("--tenant", required=True, help="whose key it is; several keys may have one tenant")
    add.add_argument("--weight", type=float, help="the tenant's share when several wait (default 1)")
    add.add_argument("--max-calls", type=int, metavar="N", help="calls in flight; 0: no limit (the default)")
    add.add_argument("--calls-per-minute", type=int, metavar="N", help="0: no limit (the default)")
    add.add_argument("--max-priority", choices=["train", "eval", "bulk"], help="what asks for more is served with this")
    add.add_argument(
        "--max-limit", action="append", metavar="NAME=VALUE", help="the most that a program may ask for, such as memory_mb=1024"
    )
    add.add_argument("--operator", action="store_true", help="this key also sees the metrics and figures of all tenants")
    add.set_defaults(run=keys_add)

    list_ = actions.add_parser("list", parents=[file], help="show tenants and the ids of their keys")
    list_.set_defaults(run=keys_list)

    remove = actions.add_parser("remove", parents=[file], help="take keys back; running services notice within a second")
    remove.add_argument("id", nargs="+", help="as `list` shows it")
    remove.set_defaults(run=keys_remove)


def keys_add(options: argparse.Namespace) -> int:
    from exec_service.config import ConfigError
    from exec_service.tenants.keys import add_key

    try:
        limits = read_max_limits(options.max_limit)
        secret, entry = add_key(
            options.file,
            options.tenant,
            operator=options.operator,
            weight=options.weight,
            max_calls=options.max_calls,
            calls_per_minute=options.calls_per_minute,
            max_priority=options.max_priority,
            max_limits=limits,
        )
    except ConfigError as error:
        return fail(str(error), EXIT_USAGE)
    print(secret)
    for name, most in (limits or {}).items():
        if most < (usual := getattr(Limits(), name)):
            print(f"Calls have {name} {usual:g} if they say nothing; callers with this key have to say less.", file=sys.stderr)
    print(
        f"Key {entry.id} of tenant {entry.tenant!r} is in {options.file}; the key itself is only here, so keep it. "
        "Callers set EXEC_API_KEY, or send `Authorization: Bearer KEY`.",
        file=sys.stderr,
    )
    return 0


def read_max_limits(given: list[str] | None) -> dict[str, float] | None:
    from exec_service.config import ConfigError
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


def keys_list(options: argparse.Namespace) -> int:
    from exec_service.config import ConfigError
    from exec_service.tenants.keys import read_keys

    try:
        content = read_keys(options.file)
    except ConfigError as error:
        return fail(str(error), EXIT_USAGE)
    for entry in content.keys:
        allowance = encode_json(content.allowance(entry.tenant)).decode()
        print(f"{entry.id}  {entry.created:10}  {entry.tenant}  {allowance}{'  operator' if entry.operator else ''}")
    return 0


def keys_remove(options: argparse.Namespace) -> int:
    from exec_service.config import ConfigError
    from exec_service.tenants.keys import remove_key

    try:
        for id in options.id:
            entry = remove_key(options.file, id)
            print(f"removed key {entry.id} of tenant {entry.tenant!r}", file=sys.stderr)
    except ConfigError as error:
        return fail(str(error), EXIT_USAGE)
    return 0


def run_up(options: argparse.Namespace) -> int:
    from exec_service.api.middleware import BindRefused
    from exec_service.app import GrpcPortTaken, PortTaken
    from exec_service.cli.up import up
    from exec_service.config import ConfigError, GatewayConfig, read_environment
    from exec_service.telemetry.logs import start_logs
    from exec_wire.supervisor import EXIT_TASK_FAILED, TaskKeepsFailing
    from worker.config import WorkerConfig

    try:
        gateway = read_environment(
            GatewayConfig,
            os.environ,
            host=options.host,
            port=options.port,
            grpc_port=options.grpc_port,
            keys=options.keys,
            jobs_dir=options.jobs_dir,
            metrics_port=options.metrics_port,
        )
        start_logs(gateway.log_level, gateway.log_format)
        if options.grpc_port is None and "EXEC_GRPC_PORT" not in os.environ:
            gateway = without_grpc_if_taken(gateway)
        worker = read_environment(WorkerConfig, os.environ, slots=options.slots, min_tier=weakest_tier(options))
        _run_loop(up(gateway, worker))
    except GrpcPortTaken as error:
        return fail(f"{error}. Another port: --grpc-port 50052; none: --grpc-port 0", EXIT_UNAVAILABLE)
    except PortTaken as error:
        return fail(f"{error}. Another port: exec-service up --port 9000 (or make run PORT=9000)", EXIT_UNAVAILABLE)
    except (ConfigError, BindRefused) as error:
        return fail(str(error), EXIT_USAGE)
    except TaskKeepsFailing as error:
        return fail(str(error), EXIT_TASK_FAILED)
    return 0


def without_grpc_if_taken(config: GatewayConfig) -> GatewayConfig:
    """Two services on one machine: the second one's callers have HTTP, and whoever wants gRPC too is told how."""
    import msgspec

    from exec_service.app import GrpcPortTaken, address_for_grpc
    from exec_service.telemetry.logs import say

    try:
        address_for_grpc(config.host, config.grpc_port, keys=bool(config.keys))
    except GrpcPortTaken as error:
        say(f"exec-service: {error}, so it is off. Another port: --grpc-port 50052; none: --grpc-port 0")
        return msgspec.structs.replace(config, grpc_port=0)
    return config


def weakest_tier(options: argparse.Namespace) -> str:
    """For one user on his own machine a weaker sandbox will do; a worker of a cluster keeps its stricter default."""
    return "E" if options.insecure else os.environ.get("EXEC_MIN_TIER", "D")


def run_doctor(options: argparse.Namespace) -> int:
    from exec_service.cli.doctor import examine, show
    from exec_service.config import ConfigError, read_environment
    from worker.config import WorkerConfig

    try:
        config = read_environment(WorkerConfig, os.environ, min_tier="E", profiles={})
    except ConfigError as error:
        return fail(str(error), EXIT_USAGE)
    report = _run_loop(examine(config, options.port))
    show(report, as_json=options.json)
    return report.exit_code


def run_runner(options: argparse.Namespace) -> int:
    from worker.sandbox import runner
    from worker.sandbox.runner_options import RunnerOptions

    arguments = ["--socket", str(options.socket), *RunnerOptions.read(options).arguments()]
    runner.main([*arguments, *(["--user-namespace"] if options.user_namespace else [])])
    return 0


def add_jobs_parser(jobs: argparse.ArgumentParser) -> None:
    actions = jobs.add_subparsers(required=True, metavar="ACTION")
    service = argparse.ArgumentParser(add_help=False)
    service.add_argument("--url", default="http://127.0.0.1:8080", help="the service (default http://127.0.0.1:8080)")
    job = argparse.ArgumentParser(add_help=False, parents=[service])
    job.add_argument("job", help="its id, as `submit` and `status` show it")

    submit = actions.add_parser("submit", parents=[service], help="send a file of items and print the id of the job")
    submit.add_argument("file", help='a file, or - for standard input; a line is {"call": …}, {"judge": …} or {"verify": …}')
    submit.add_argument("--name", default="", help="a name to know it by")
    submit.add_argument("--watch", action="store_true", help="stay until it has ended")
    status = actions.add_parser("status", parents=[service], help="how far a job is; without an id all of yours")
    status.add_argument("job", nargs="?")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    actions.add_parser("watch", parents=[job], help="a progress bar, until the job has ended")
    results = actions.add_parser("results", parents=[job], help="the results that are there, one per line")
    results.add_argument("--follow", action="store_true", help="and those to come, until the job has ended")
    results.add_argument("-o", "--output", type=Path, help="write them to this file")
    for name, words in (("pause", "begin no more items"), ("resume", "go on"), ("cancel", "end it; what is done stays")):
        actions.add_parser(name, parents=[job], help=words)
    actions.add_parser("remove", parents=[job], help="remove a job that has ended, with its results")
    for name, action in actions.choices.items():
        action.set_defaults(run=run_jobs, action=name)


def run_jobs(options: argparse.Namespace) -> int:
    from exec_service.cli import jobs as jobs_cli

    try:
        return jobs_cli.run(options)
    except jobs_cli.Failed as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run_jobs_worker(options: argparse.Namespace) -> int:
    from exec_service.config import ConfigError, JobsWorkerConfig, read_environment
    from exec_service.telemetry.logs import start_logs

    try:
        config = read_environment(
            JobsWorkerConfig,
            os.environ,
            redis=options.redis,
            jobs_dir=options.jobs_dir,
            jobs_gateway=options.gateway,
            jobs_chunks=options.chunks,
            jobs_at_once=options.at_once,
        )
        start_logs(config.log_level, config.log_format)
        from exec_service.jobs.celery_tasks import work

        return work(config)
    except ConfigError as error:
        return fail(str(error), EXIT_USAGE)


def run_gateway(options: argparse.Namespace) -> int:
    from exec_service.config import GatewayConfig, read_environment
    from exec_service.telemetry.logs import start_logs

    def start() -> Coroutine[Any, Any, None]:
        from exec_service.cli import cluster

        names = ("host", "port", "grpc_port", "keys", "redis", "metrics_port", "jobs_dir")
        config = read_environment(GatewayConfig, os.environ, **{name: getattr(options, name) for name in names})
        start_logs(config.log_level, config.log_format)
        return cluster.run_gateway(config)

    return _run_part(start)


def run_worker(options: argparse.Namespace) -> int:
    from exec_service.config import ConfigError, read_environment
    from exec_service.telemetry.logs import start_logs
    from worker.config import WorkerConfig

    def start() -> Coroutine[Any, Any, None]:
        from exec_service.cli import cluster

        given = {"slots": options.slots, "runtime": options.runtime, "redis": options.redis}
        tier = "E" if options.insecure else options.min_tier
        config = read_environment(WorkerConfig, os.environ, min_tier=tier, metrics_port=options.metrics_port, **given)
        if config.runtime == "echo" and not options.insecure:
            raise ConfigError("--runtime echo runs no programs but pretends to: it is for benchmarks, and needs --insecure")
        start_logs(config.log_level, config.log_format)
        return cluster.run_worker(config)

    return _run_part(start)


def _run_part(start: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """One process of a cluster, until a signal comes."""
    from exec_service.api.middleware import BindRefused
    from exec_service.app import PortTaken
    from exec_service.config import ConfigError
    from exec_wire.supervisor import EXIT_TASK_FAILED, TaskKeepsFailing
    from worker.sandbox.runner_client import SandboxUnavailable

    try:
        _run_loop(start())
    except (PortTaken, SandboxUnavailable) as error:
        return fail(str(error), EXIT_UNAVAILABLE)
    except (ConfigError, BindRefused) as error:
        return fail(str(error), EXIT_USAGE)
    except TaskKeepsFailing as error:
        return fail(str(error), EXIT_TASK_FAILED)
    return 0


def run_program(options: argparse.Namespace) -> int:
    if (options.file is None) == (options.code is None):
        return fail("give either a file (or -) or -c CODE", EXIT_USAGE)
    try:
        code = options.code if options.code is not None else read_program(options.file)
    except (OSError, UnicodeDecodeError) as error:
        return fail(f"{options.file}: {error}", EXIT_USAGE)
    try:
        stdin = "" if options.file == "-" or sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        return fail(f"standard input cannot be passed on, it has to be text: {error}", EXIT_USAGE)
    limits = Limits(wall_s=options.wall)
    call = Call(code=code, stdin=stdin, language=options.language, limits=limits, deadline_s=options.wall + 60)
    from exec_client import CallerError, ExecError, Unavailable
    from exec_service.config import ConfigError
    from worker.sandbox.runner_client import SandboxUnavailable

    try:
        result = _run_loop(_run_remotely(call, options.url) if options.url else _run_here(call, weakest_tier(options)))
    except Unavailable as error:
        if error.result is None:
            return fail(str(error), EXIT_UNAVAILABLE)
        result = error.result
    except CallerError as error:
        return fail(str(error), EXIT_USAGE)
    except (ExecError, SandboxUnavailable) as error:
        return fail(str(error), EXIT_UNAVAILABLE)
    except ConfigError as error:
        return fail(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return show(result, as_json=options.json)


def read_program(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text()


def seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= 3600:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number of seconds, more than 0 and at most 3600, is")


def port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number from 0 to 65535 is")


async def _run_remotely(call: Call, url: str) -> Result:
    from exec_client import AsyncClient

    async with AsyncClient(url) as client:
        return await client.run(call)


async def _run_here(call: Call, min_tier: str) -> Result:
    from exec_service.config import ConfigError, read_environment
    from worker.config import WorkerConfig
    from worker.pool import Pool, ZygoteLost
    from worker.profiles import ProfileChoice

    profiles = read_environment(WorkerConfig, os.environ).profiles
    profile = ProfileChoice(profiles).choose(call.code)
    one = read_environment(WorkerConfig, os.environ, slots=1, profiles={profile: profiles[profile]}, min_tier=min_tier)
    async with Pool(one) as pool:
        if call.language not in pool.languages:
            raise ConfigError(f"--language {call.language} is not installed here; there are: {', '.join(pool.languages)}")
        await pool.wait_ready()
        try:
            return await pool.run(call, pool.take_slot(), call.deadline_s)
        except ZygoteLost:
            return verdict("worker_lost", error="the interpreter died with the program in it")


def show(result: Result, *, as_json: bool) -> int:
    """The program's own output and exit code, as if it had run here."""
    if as_json:
        print(encode_json(result).decode())
    else:
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        if result.status not in ("ok", "error"):
            print(f"exec-service: {result.status} (blame: {result.blame}) {result.error}".rstrip(), file=sys.stderr)
    if result.blame == "infra":
        return EXIT_INFRA
    if result.blame == "client":
        return EXIT_USAGE
    if result.exit_code is not None:
        return result.exit_code
    return 128 + result.signal if result.signal is not None else EXIT_LIMIT


def _run_loop(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ModuleNotFoundError:
        main.close()
        raise
    return uvloop.run(main)


def fail(words: str, code: int) -> int:
    import logging

    from exec_service.telemetry.logs import say

    say(f"exec-service: {words}", logging.ERROR)
    return code


if __name__ == "__main__":
    main()
