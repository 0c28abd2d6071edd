"""The tools that a model can be given, described once: `GET /v1/tools` in OpenAI's form, and the MCP door."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

TEXT_CHARS = 20_000  # of what a model reads as a tool's answer


class PythonArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What the tool `python` takes."""

    code: Annotated[str, Meta(description="The program. What it prints is the answer; so is the value of its last line.")]
    input: Annotated[str, Meta(description="What the program reads from standard input.")] = ""


class Function(Struct, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]


class Tool(Struct, frozen=True):
    function: Function
    type: Literal["function"] = "function"


class Tools(Struct, frozen=True):
    """The answer of `GET /v1/tools`: to be passed on as `tools` of a chat completion."""

    tools: list[Tool] = field(default_factory=list)


def parameters(arguments: type[Struct]) -> dict[str, Any]:
    """As JSON Schema, without references: not every reader follows them."""
    _, schemas = msgspec.json.schema_components([arguments])
    schema = schemas[arguments.__name__]
    return {name: schema[name] for name in ("type", "properties", "required", "additionalProperties") if name in schema}


PYTHON = Function(
    "python",
    "Runs a Python program in a sandbox of its own and answers what it printed. numpy, scipy, sympy, pandas and matplotlib are "
    "there; there is no network, and nothing is kept between calls. Programs are stopped after 10 seconds.",
    parameters(PythonArguments),
)
TOOLS = Tools([Tool(PYTHON)])
