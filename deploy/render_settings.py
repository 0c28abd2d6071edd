"""Writes the service's settings into docs/configuration.md, and into the chart: values.yaml (with their help) and
values.schema.json (with their bounds).

    python deploy/render_settings.py      after a change of exec_service/config.py or worker/config.py

A setting that the chart makes from other values is in `SET_BY_THE_CHART`; one that no operator needs in `LEFT_OUT`.
"""

import json
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct
from msgspec.structs import FieldInfo

sys.path.insert(0, str(Path(__file__).parents[1]))

from exec_service.config import GatewayConfig, JobsWorkerConfig, allowed, default_of, settings
from worker.config import WorkerConfig

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "exec-service"
CONFIGS: dict[str, type[Struct]] = {"gateway": GatewayConfig, "worker": WorkerConfig, "jobs": JobsWorkerConfig}
SET_BY_THE_CHART = {
    "gateway": {
        *("host", "port", "processes", "grpc_port", "keys", "redis", "metrics_host", "metrics_port"),
        *("jobs_dir", "jobs_redis"),
    },
    "worker": {"redis", "metrics_host", "metrics_port", "runner_socket"},
    "jobs": {"redis", "jobs_redis", "jobs_dir", "jobs_gateway"},
}
LEFT_OUT = {
    "gateway": set[str](),
    # The runner's image says where packages are, and has one Python; a pod has one runner; the others are for tests and
    # benchmarks.
    "worker": {"processes", "packages", "program_python", "runtime", "mask_layers", "fault_injection"},
    "jobs": set[str](),
}
WIDTH = 128
PAGE_HEAD = """# Configuration

Made by `python deploy/render_settings.py` from the classes named below; a test compares the two.

A setting is read once, when the process starts: from its variable, unless the command line gives it (`exec-service up --help`).
An invalid value stops start-up, and the message names the variable. So does a variable that begins with `EXEC_` and
is not listed here. Lists and maps are written as JSON.
`exec-service up` is a gateway and a worker in one process and takes the settings of both; there
`EXEC_MIN_TIER` is `D` if it is not set.
"""
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def computed(field: FieldInfo) -> types.FunctionType | None:
    """The function of a default that depends on the machine."""
    factory = field.default_factory
    return factory if isinstance(factory, types.FunctionType) and factory.__name__ != "<lambda>" else None


# -- docs/configuration.md ------------------------------------------------------------------------------------------------


def page() -> str:
    parts = [PAGE_HEAD]
    for title, config in zip(("Gateway", "Worker", "Jobs worker"), CONFIGS.values(), strict=True):
        lines = ["| variable | default | allowed | description |", "| --- | --- | --- | --- |"]
        for setting, field in zip(settings(config), msgspec.structs.fields(config), strict=True):
            cells = (f"`{setting.env}`", _described(field), allowed(field.type), setting.help)
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
        parts.append("\n".join([f"## {title}\n\n`{config.__module__}.{config.__name__}`\n", *lines, ""]))
    return "\n".join(parts)


def _described(field: FieldInfo) -> str:
    """Its default; one that depends on the machine is the first line of its function's docstring."""
    if factory := computed(field):
        first = (factory.__doc__ or factory.__name__.replace("_", " ")).splitlines()[0].removesuffix(".")
        return first[0].lower() + first[1:]
    value = default_of(field)
    if value == "":
        return "none"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    sizes = UNITS if field.name.endswith("_bytes") and isinstance(value, int) and value else ()
    return f"`{text}`" + next((f" ({value // size} {unit})" for size, unit in sizes if value % size == 0), "")


# -- the chart ------------------------------------------------------------------------------------------------------------


def fields_of(part: str) -> list[FieldInfo]:
    hidden = SET_BY_THE_CHART[part] | LEFT_OUT[part]
    return [field for field in msgspec.structs.fields(CONFIGS[part]) if field.name not in hidden]


def values_text(part: str) -> str:
    """The lines between the marks in values.yaml."""
    help_of = {setting.name: setting.help for setting in settings(CONFIGS[part])}
    lines = []
    for field in fields_of(part):
        lines += [f"    # {line}" for line in textwrap.wrap(help_of[field.name], WIDTH - 6)]
        lines.append(f"    {field.name}: {_shown(field)}")
    return "\n".join(lines)


def _shown(field: FieldInfo) -> str:
    """A default that depends on the machine is left to the machine."""
    if computed(field):
        return "null"
    value = default_of(field)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value) if not isinstance(value, str) or not value else yaml.safe_dump(value).splitlines()[0]


def schema_of(part: str) -> dict[str, Any]:
    """A JSON Schema of the same, and of the types that it names; null is allowed everywhere."""
    config = CONFIGS[part]
    text = json.dumps(msgspec.json.schema(config)["$defs"]).replace("#/$defs/", "#/definitions/")  # as in draft 7
    named = json.loads(text)
    whole = named.pop(config.__name__)["properties"]
    properties = {}
    for field in fields_of(part):
        one = {key: value for key, value in whole[field.name].items() if key not in ("default", "description")}
        properties[field.name] = {"description": whole[field.name]["description"], "anyOf": [one, {"type": "null"}]}
    return named | {f"{part}Config": {"type": "object", "additionalProperties": False, "properties": properties}}


def new_values(text: str) -> str:
    for part, config in CONFIGS.items():
        mark = config.__name__
        pattern = re.compile(rf"(    # <{mark}>[^\n]*\n).*?(    # </{mark}>\n)", re.S)
        text, found = pattern.subn(lambda m, part=part: f"{m[1]}{values_text(part)}\n{m[2]}", text)
        if found != 1:
            raise SystemExit(f"values.yaml has no marks for {mark}")
    return text


def new_schema(text: str) -> str:
    schema = json.loads(text)
    for part in CONFIGS:
        schema["definitions"] |= schema_of(part)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    for name, renew in (("values.yaml", new_values), ("values.schema.json", new_schema)):
        path = CHART / name
        path.write_text(renew(path.read_text()))
    (ROOT / "docs" / "configuration.md").write_text(page())


if __name__ == "__main__":
    main()
