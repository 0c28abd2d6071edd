"""Prints docs/configuration.md from the classes that hold the settings:

python -m exec_service.config_docs > docs/configuration.md
"""

import types
from collections.abc import Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo

from exec_service.config import GatewayConfig, JobsWorkerConfig, allowed, default_of, settings

HEAD = """# Configuration

Made by `python -m exec_service.config_docs` from the classes named below; a test compares the two.

A setting is read once, when the process starts: from its variable, unless the command line gives it (`exec-service up --help`).
An invalid value stops start-up, and the message names the variable. So does a variable that begins with `EXEC_` and
is not listed here. Lists and maps are written as JSON.
`exec-service up` is a gateway and a worker in one process and takes the settings of both; there
`EXEC_MIN_TIER` is `D` if it is not set.
"""
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def page() -> str:
    from worker.config import WorkerConfig  # a tool of this repository; a gateway does not import workers

    parts = [HEAD]
    for title, config in (("Gateway", GatewayConfig), ("Worker", WorkerConfig), ("Jobs worker", JobsWorkerConfig)):
        parts.append(f"## {title}\n\n`{config.__module__}.{config.__name__}`\n")
        parts.append("\n".join(_table(config)) + "\n")
    return "\n".join(parts)


def _table(config: type[Struct]) -> Iterator[str]:
    yield "| variable | default | allowed | description |"
    yield "| --- | --- | --- | --- |"
    for setting, field in zip(settings(config), msgspec.structs.fields(config), strict=True):
        cells = (f"`{setting.env}`", _default(field), allowed(field.type), setting.help)
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _default(field: FieldInfo) -> str:
    if isinstance(field.default_factory, types.FunctionType) and field.default_factory.__name__ != "<lambda>":
        return _described(field.default_factory)
    value = default_of(field)
    if value == "":
        return "none"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"`{text}`{_size(field.name, value)}"


def _described(factory: types.FunctionType) -> str:
    """A default that depends on the machine: the first line of its function's docstring."""
    if factory.__doc__:
        first = factory.__doc__.splitlines()[0].removesuffix(".")
        return first[0].lower() + first[1:]
    return factory.__name__.replace("_", " ")


def _size(name: str, value: object) -> str:
    if not name.endswith("_bytes") or not isinstance(value, int):
        return ""
    return next((f" ({value // size} {unit})" for size, unit in UNITS if value and value % size == 0), "")


if __name__ == "__main__":
    print(page(), end="")
