"""The tools for models, described once: `GET /v1/tools` in OpenAI's form, and for the MCP adapter."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from exec_wire.messages.sessions import MAX_FORKS

TEXT_CHARS = 20_000  # in a tool's answer to a model


class PythonArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of the tool `python`."""

    code: Annotated[str, Meta(description="The program. What it prints is the answer; so is the value of its last line.")]
    input: Annotated[str, Meta(description="What the program reads from standard input.")] = ""


SessionName = Annotated[str, Meta(description="The session: what python_session_start or python_session_fork answered.")]


class StartArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """The tool `python_session_start` takes no arguments."""


class SessionArguments(Struct, frozen=True, forbid_unknown_fields=True):
    session: SessionName


class CellArguments(Struct, frozen=True, forbid_unknown_fields=True):
    session: SessionName
    code: Annotated[str, Meta(description="The cell. What it prints is the answer; so is the value of its last line.")]
    input: Annotated[str, Meta(description="What the cell reads from standard input.")] = ""


class ForkArguments(Struct, frozen=True, forbid_unknown_fields=True):
    session: SessionName
    n: Annotated[int, Meta(ge=1, le=MAX_FORKS, description="How many copies.")] = 1


class Function(Struct, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]


class Tool(Struct, frozen=True):
    function: Function
    type: Literal["function"] = "function"


class Tools(Struct, frozen=True):
    """The answer of `GET /v1/tools`, for `tools` of a chat completion."""

    tools: list[Tool] = field(default_factory=list)


def parameters(arguments: type[Struct]) -> dict[str, Any]:
    """JSON Schema without references, which not every client follows."""
    _, schemas = msgspec.json.schema_components([arguments])
    schema = schemas[arguments.__name__]
    return {name: schema[name] for name in ("type", "properties", "required", "additionalProperties") if name in schema}


PYTHON = Function(
    "python",
    "Runs a Python program in a sandbox of its own and answers what it printed. numpy, scipy, sympy, pandas and matplotlib are "
    "there; there is no network, and nothing is kept between calls. Programs are stopped after 10 seconds.",
    parameters(PythonArguments),
)
START = Function(
    "python_session_start",
    "Starts a Python session, which keeps its variables, imports and files between cells, and answers its id. It ends when "
    "it is not used for 10 minutes.",
    parameters(StartArguments),
)
RUN_CELL = Function(
    "python_session_run",
    "Runs a cell in a Python session, as a notebook does, and answers what it printed and the value of its last line. numpy, "
    "scipy, sympy, pandas and matplotlib are there; figures are shown. There is no network. A cell is stopped after 10 s.",
    parameters(CellArguments),
)
FORK = Function(
    "python_session_fork",
    "Copies a Python session with all its variables and files, and answers the ids of the copies. Each goes its own way; only "
    "files at absolute paths below /tmp are shared. For trying several continuations from the same state.",
    parameters(ForkArguments),
)
ROLL_BACK = Function(
    "python_session_rollback",
    "Returns a Python session to its state before the last cell, once: also after a crash or a time-out.",
    parameters(SessionArguments),
)
END = Function("python_session_end", "Ends a Python session.", parameters(SessionArguments))
FUNCTIONS = (PYTHON, START, RUN_CELL, FORK, ROLL_BACK, END)
TOOLS = Tools([Tool(function) for function in FUNCTIONS])
