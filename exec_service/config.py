"""The settings of a gateway and of a jobs worker: one frozen class each, read from the environment once.

Each field's `Meta` holds its bounds and its description; docs/configuration.md and the chart's values are generated from them.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from exec_wire.messages.bounds import MOST, Bounds
from exec_wire.messages.calls import GivenLabel
from exec_wire.messages.unknown_fields import suggestion
from exec_wire.queue.urls import is_several

ENV_PREFIX = "EXEC_"
REDIS = (
    "Redis or Valkey server between gateways and workers: redis://, rediss:// or unix://; several URLs, separated by commas, "
    "or redis+cluster://, are one queue, see cluster.md"
)
LOG_LEVELS = "Lowest level of the log lines that are written; requests are info, see docs/operations.md"
LOG_FORMAT = "Format of every log line; if not set, text on a terminal and json elsewhere"
BOUNDS = Bounds()
KINDS: dict[object, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_NOT_OURS = (
    "API_KEY URL CPUSET OVERSAMPLE SEED REDIS_SERVER SLOW REAL INTEGRATIONS ENGINES SUPPORT_RECORD TEST_URL TEST_DEPLOY "
    "TEST_SLOWNESS LEAK_CALLS FUZZ"
)
NOT_OURS = frozenset(ENV_PREFIX + name for name in _NOT_OURS.split())
"""Variables with the prefix that are not settings: clients, compose.yaml and tests read them."""
_SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT\w*)|\w+_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")
AdapterName = Literal["code-judge", "sandbox-fusion", "nemo-skills", "piston", "mcp"]


class ConfigError(ValueError):
    """A setting has an invalid value; the message names the variable."""


def default_log_format() -> Literal["json", "text"]:
    """Text on a terminal, else json."""
    return "text" if sys.stderr.isatty() else "json"


class KeylessAdapter(Struct, frozen=True, forbid_unknown_fields=True):
    """The tenant of an adapter's clients that send no key, and how many of their calls may be in flight."""

    tenant: GivenLabel
    max_calls: Annotated[int, Meta(ge=1)]


def about(description: str, **bounds: Any) -> Meta:
    """The description of a setting and its bounds."""
    return Meta(description=description, **bounds)


class GatewayConfig(Struct, frozen=True, kw_only=True):
    host: Annotated[str, about("Address to listen on; without keys it must be a loopback address")] = "127.0.0.1"
    port: Annotated[int, about("TCP port to listen on; 0 takes a free one", ge=0, le=65535)] = 8080
    grpc_port: Annotated[int, about("TCP port for gRPC, at the same address; 0 for none", ge=0, le=65535)] = 50051
    keys: Annotated[str, about("File of API keys (`exec-service keys add`); if set, every call needs a key, see keys.md")] = ""
    backlog: Annotated[int, about("Connections the kernel holds before they are accepted", ge=1)] = 32768

    processes: Annotated[
        int,
        about(
            "Processes of `exec-service gateway`, each with an event loop; limits of calls, bytes and connections are "
            "those of each process",
            ge=1,
            le=256,
        ),
    ] = 1
    max_connections: Annotated[
        int,
        about(
            "HTTP and gRPC connections open at once; beyond it the one that has been idle longest is closed. "
            "0: as many as the limit on open files allows, up to 32,768. Descriptors for the worker are always reserved",
            ge=0,
        ),
    ] = 0
    max_header_bytes: Annotated[int, about("Bytes of a request's first line and headers; beyond it 431", ge=1024)] = 64 << 10
    header_s: Annotated[float, about("How long a connection may take to send its headers; beyond it 408", gt=0)] = 30.0
    body_s: Annotated[float, about("Time for a body to arrive, plus 1 s for each 128 KiB received; beyond it 408", gt=0)] = 60.0

    redis: Annotated[str, about(REDIS)] = ""
    metrics_host: Annotated[str, about("Address of the port for metrics and health")] = "127.0.0.1"
    metrics_port: Annotated[int, about("Port for metrics and health; 0: a free one, none with `up`", ge=0, le=65535)] = 0

    max_calls: Annotated[int, about("Calls admitted and not yet delivered; beyond it 429", ge=1)] = 60_000
    max_bytes: Annotated[int, about("Bytes of admitted calls and undelivered results; beyond it 429", ge=1)] = 1 << 30
    max_calls_per_request: Annotated[int, about("Calls in one batch; beyond it 413", ge=1)] = 4096
    max_body_bytes: Annotated[int, about("Bytes in one request body; beyond it 413", ge=1)] = 64 << 20
    max_strings_per_request: Annotated[
        int, about("Names and texts in one request body, counted before it is decoded; beyond it 413", ge=1024)
    ] = 1 << 18
    max_files: Annotated[
        int, about("`files` of one call or session, and as many `fetch_files`; beyond it 422", ge=1, le=MOST.files)
    ] = BOUNDS.files
    max_path_depth: Annotated[
        int, about("Folders above a file of `files` or `fetch_files`; beyond it 422", ge=1, le=MOST.path_depth)
    ] = BOUNDS.path_depth
    max_variables: Annotated[
        int, about("`env` of one call or session, and as many `argv`; beyond it 422", ge=1, le=MOST.variables)
    ] = BOUNDS.variables
    max_text_bytes: Annotated[
        int, about("Bytes of the paths, of `env` or of `argv` of one call; beyond it 422", ge=1, le=MOST.text_bytes)
    ] = BOUNDS.text_bytes

    max_output_kb: Annotated[int, about("Largest limits.output_kb of a call; beyond it 422", ge=1024, le=1 << 16)] = 4096

    release_factor: Annotated[float, about("Unanswered jobs of all gateways at the workers, per slot", ge=1)] = 1.25
    answer_grace_s: Annotated[float, about("Time for a worker to answer after a call's deadline or cancellation", ge=0)] = 2.0
    workers_refresh_s: Annotated[float, about("Seconds between two reads of the list of live workers", gt=0)] = 1.0

    idempotency_ttl_s: Annotated[float, about("How long a result is kept for its idempotency key", ge=0)] = 120.0
    idempotency_max_bytes: Annotated[int, about("Bytes of results kept for idempotency keys", ge=0)] = 128 << 20

    retry_after_max_s: Annotated[float, about("Largest Retry-After of a refusal", ge=1)] = 60.0
    write_stall_s: Annotated[float, about("A client that reads nothing for this long is disconnected", gt=0)] = 60.0
    keep_alive_s: Annotated[int, about("How long an idle connection is kept open", ge=1)] = 75
    drain_s: Annotated[float, about("How long a shutdown waits for accepted calls", ge=0)] = 30.0

    adapters: Annotated[list[AdapterName], about("Enabled adapters for clients of other services, see docs/move")] = (
        msgspec.field(default_factory=lambda: list(get_args(AdapterName)))
    )
    keyless_adapters: Annotated[
        dict[AdapterName, KeylessAdapter],
        about(
            "Adapters that accept clients without a key, each with their tenant and their most calls in flight: "
            '{"code-judge": {"tenant": "rl", "max_calls": 5000}}. Where keys are required, every other adapter needs a key'
        ),
    ] = {}
    codejudge_wall_s: Annotated[float, about("Wall time of a program of code-judge clients", gt=0, le=3600)] = 10.0
    codejudge_memory_mb: Annotated[int, about("Memory of a program of code-judge clients", ge=16, le=1 << 16)] = 256
    codejudge_deadline_s: Annotated[float, about("When code-judge clients are answered queue_timeout", gt=0, le=7200)] = 55.0
    fusion_memory_mb: Annotated[int, about("Memory of SandboxFusion programs that set no limit", ge=16, le=1 << 16)] = 1024
    fusion_wait_s: Annotated[float, about("Time beyond its limits until a SandboxFusion call gets 504", gt=0, le=3600)] = 8.0

    jobs_dir: Annotated[str, about("Folder of bulk jobs, shared by gateways and jobs workers, see jobs.md; empty: none")] = ""
    jobs_redis: Annotated[str, about("Redis or Valkey server of bulk jobs; that of EXEC_REDIS if empty")] = ""
    jobs_max_items: Annotated[int, about("Items in one bulk job; beyond it 413", ge=1)] = 1_000_000
    jobs_max_bytes: Annotated[int, about("Bytes in one bulk job; beyond it 413", ge=1)] = 8 << 30
    jobs_max_live: Annotated[int, about("Unfinished bulk jobs of one tenant; beyond it 429", ge=1)] = 100
    jobs_max_kept_items: Annotated[
        int, about("Items in all stored bulk jobs of one tenant, ended ones included; beyond it 413", ge=1)
    ] = 10_000_000
    jobs_chunk_items: Annotated[int, about("Items in a chunk of a bulk job; jobs workers run chunks", ge=1, le=100_000)] = 500
    jobs_keep_s: Annotated[float, about("How long an ended bulk job and its results are kept", gt=0)] = 7 * 86400.0

    otlp_endpoint: Annotated[str, about("OpenTelemetry collector (OTLP/HTTP), such as http://localhost:4318; empty: none")] = ""
    trace_ratio: Annotated[float, about("Share of calls to trace where no traceparent decides", ge=0, le=1)] = 1.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about(LOG_LEVELS)] = "warning"
    log_format: Annotated[Literal["json", "text"], about(LOG_FORMAT)] = msgspec.field(default_factory=default_log_format)

    @property
    def jobs_broker(self) -> str:
        return self.jobs_redis or self.redis

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.max_files, self.max_path_depth, self.max_variables, self.max_text_bytes)

    def __post_init__(self) -> None:
        # Otherwise every attempt of a request within its own limits could be answered 429.
        if self.max_calls < self.max_calls_per_request:
            raise ConfigError(f"max_calls ({self.max_calls}) is below max_calls_per_request ({self.max_calls_per_request})")
        if self.max_bytes < self.max_body_bytes:
            raise ConfigError(f"max_bytes ({self.max_bytes}) is below max_body_bytes ({self.max_body_bytes})")
        if self.jobs_dir:
            _check_broker(self.jobs_broker)


class JobsWorkerConfig(Struct, frozen=True, kw_only=True):
    """Settings of `exec-service jobs-worker`, which runs the chunks of bulk jobs in a cluster."""

    redis: Annotated[str, about("URL of the gateways' Redis or Valkey server, if jobs_redis is not set")] = ""
    jobs_redis: Annotated[str, about("URL of the Redis or Valkey server of bulk jobs, as the gateways have it")] = ""
    jobs_dir: Annotated[str, about("The gateways' folder of bulk jobs")] = ""
    jobs_gateway: Annotated[str, about("URL of the gateway or of a load balancer, or several URLs separated by commas")] = (
        "http://127.0.0.1:8080"
    )
    jobs_chunks: Annotated[int, about("Chunks that run at the same time", ge=1, le=64)] = 2
    jobs_at_once: Annotated[int, about("Items of one chunk that are in flight at once", ge=1, le=4096)] = 32
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about(LOG_LEVELS)] = "warning"
    log_format: Annotated[Literal["json", "text"], about(LOG_FORMAT)] = msgspec.field(default_factory=default_log_format)

    @property
    def jobs_broker(self) -> str:
        return self.jobs_redis or self.redis

    def __post_init__(self) -> None:
        missing = [name for name, value in (("redis", self.jobs_broker), ("jobs_dir", self.jobs_dir)) if not value]
        if missing:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ConfigError(
                f"a jobs worker needs {options} (or EXEC_{', EXEC_'.join(missing).upper()}), the same as its gateways"
            )
        _check_broker(self.jobs_broker)
        if not all(url.strip().startswith(("http://", "https://")) for url in self.jobs_gateway.split(",")):
            raise ConfigError(f"jobs_gateway must be a URL such as http://gateway:8080, not {self.jobs_gateway!r}")


def _check_broker(urls: str) -> None:
    if is_several(urls):
        raise ConfigError("bulk jobs need one Redis or Valkey server: name it in EXEC_JOBS_REDIS, for EXEC_REDIS has several")


C = TypeVar("C", bound=Struct)


def read_environment(config: type[C], environ: Mapping[str, str], **given: object) -> C:
    """The settings from `given` where it is not None, else from `EXEC_*` variables, else the defaults.

    Raises:
        ConfigError: a value is not allowed, or a variable with the prefix is unknown.
    """
    check_names(environ)
    values = {name: value for name, value in given.items() if value is not None}
    for setting in settings(config):
        value = values.get(setting.name, environ.get(setting.env))
        if value is None:
            continue
        try:
            if isinstance(value, str) and value.startswith(("{", "[")):
                values[setting.name] = msgspec.json.decode(value, type=setting.type)
            else:
                values[setting.name] = msgspec.convert(value, setting.type, strict=False)
        except msgspec.DecodeError as error:
            wanted = str(error) if (known := allowed(setting.type)) in ("JSON", "text") else known
            raise ConfigError(f"{setting.env} (setting {setting.name}) is {value!r}; allowed: {wanted}") from None
    try:
        return msgspec.convert(values, config)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def allowed(type_: object) -> str:
    """The allowed values of a setting, for messages and docs/configuration.md."""
    kind, *extras = get_args(type_) if get_origin(type_) is Annotated else (type_,)
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if kind not in KINDS:
        return "JSON"
    meta = next(extra for extra in extras if isinstance(extra, Meta))
    marks = (("more than", meta.gt), ("at least", meta.ge), ("less than", meta.lt), ("at most", meta.le))
    bounds = [f"{mark} {bound}" for mark, bound in marks if bound is not None]
    return " ".join([KINDS[kind], " and ".join(bounds)]).rstrip()


def check_names(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an unknown variable with the prefix, so that a misspelt one is not ignored silently."""
    from worker.config import WorkerConfig  # only for the names: processes of one machine often share their environment

    known = {setting.env for config in (GatewayConfig, WorkerConfig, JobsWorkerConfig) for setting in settings(config)}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known | NOT_OURS and not _is_service_link(name, environ[name]):
            hint = suggestion(name, known, ENV_PREFIX) or " (docs/configuration.md lists them)."
            raise ConfigError(f"{name}: there is no such setting{hint} Rename the variable or unset it.")


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set it for a Service whose name begins with `exec-`."""
    return bool(_SERVICE_LINK.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


class Setting(Struct, frozen=True):
    """One field of a config class, as the documentation shows it."""

    name: str
    env: str
    type: object
    default: object
    help: str


def settings(config: type[Struct]) -> Iterator[Setting]:
    for field in msgspec.structs.fields(config):
        meta = next(part for part in field.type.__metadata__ if isinstance(part, Meta))
        yield Setting(field.name, ENV_PREFIX + field.name.upper(), field.type, default_of(field), meta.description or "")


def default_of(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


@cache
def package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to load

    try:
        return version("exec-service")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0+checkout"
