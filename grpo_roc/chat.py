"""The chat format: prompts, tool calls and observations as text. `rollout` holds the tokens.

An assistant turn contains one or more `<tool_call>` blocks, each a JSON object with `name` and `arguments`; a turn without one
is the last. A call that cannot be parsed is answered with an observation that says why and counts as the model's error.
"""

import json
import re
from typing import Literal, NamedTuple

START, END = "<|im_start|>", "<|im_end|>"
TOOL = "execute_python_code_with_standard_io"
_NAMES = ("reason", "answer", "tool_call", "tool_response")
TAGS = (*(tag for name in _NAMES for tag in (f"<{name}>", f"</{name}>")), "\\boxed{")
# The constant parts of a tool call in the toy's demonstrations.
CALL_HEAD = f'{{"name": "{TOOL}", "arguments": {{"code": "'
CALL_TAIL = '", "input": ""}}'
CALL_TAIL_BROKEN = '", "input": "}'
CALL_PARTS = (CALL_HEAD, CALL_TAIL, CALL_TAIL_BROKEN)


def call_json(code: str) -> str:
    """A call of the tool, as it stands between the tags."""
    return json.dumps({"name": TOOL, "arguments": {"code": code, "input": ""}})


_PARAMETERS = {
    "code": {"type": "string", "description": "The program."},
    "input": {"type": "string", "description": "Its standard input; may be empty."},
}
SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {"type": "object", "properties": _PARAMETERS, "required": [*_PARAMETERS]},
    },
}
FULL = f"""You solve problems step by step and may run Python programs while you do.
Think inside <reason> </reason>; you may do so several times. Give the final answer exactly once, inside <answer> </answer>.

The tools, as JSON schemas:
<tools>
{json.dumps(SCHEMA)}
</tools>

To use one, write a JSON object with its name and arguments inside <tool_call> </tool_call>:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
What it returns comes back inside <tool_response> </tool_response>."""
SYSTEM = {"full": FULL, "short": "Use the tool."}
QUESTION = {"full": "{problem}\n\nPut the final answer into \\boxed{{}} inside <answer> </answer>.", "short": "{problem}"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompt(problem: str, system: str, opening: str) -> str:
    """The text before the model's first token."""
    question = QUESTION[system].format(problem=problem)
    return f"{START}system\n{SYSTEM[system]}{END}\n{START}user\n{question}{END}\n{START}assistant\n{opening}"


def observation(texts: list[str], opening: str) -> str:
    """The text after the assistant's `<|im_end|>`: a user turn with the tool responses, and the header of the next turn."""
    return f"\n{START}user\n{tool_responses(texts)}{END}\n{START}assistant\n{opening}"


def tool_responses(texts: list[str]) -> str:
    return "\n".join(f"<tool_response>{escape_tags(text)}</tool_response>" for text in texts)


def escape_tags(text: str) -> str:
    """Break the format's tags in a program's output, so that output cannot end its turn or pass for an answer."""
    return re.sub(rf"<(?=\|im_(?:start|end)\||/?(?:{'|'.join(_NAMES)})>)", "< ", text)


class Observation(NamedTuple):
    """The result of one tool call: `text` for the model, `outcome` for the selection."""

    text: str
    outcome: Literal["ok", "error", "infra"]  # error: the model is to blame; infra: the service is
    status: str
    wait_s: float = 0.0


class ToolCall(NamedTuple):
    code: str
    stdin: str = ""


class ParseFailure(NamedTuple):
    why: str

    def observation(self) -> Observation:
        return Observation(self.why, "error", "parse_failure")


class Turn(NamedTuple):
    calls: list[ToolCall | ParseFailure]
    answers: int


_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|$)", re.S)


def read_turn(text: str) -> Turn:
    calls = [_read_call(body, bool(end)) for body, end in _BLOCK.findall(text)]
    return Turn(calls, text.count("<answer>"))


def _read_call(body: str, closed: bool) -> ToolCall | ParseFailure:
    if not closed:
        return ParseFailure("the tool call was not closed")
    try:
        call = json.loads(body)
    except ValueError as error:
        return ParseFailure(f"the tool call is not valid JSON: {error}")
    return _check_call(call)


def _check_call(call: object) -> ToolCall | ParseFailure:
    if not isinstance(call, dict) or "name" not in call:
        return ParseFailure("a tool call is a JSON object with a name and arguments")
    if call["name"] != TOOL:
        return ParseFailure(f"there is no tool {str(call['name'])[:64]!r}; use {TOOL}")
    arguments = call.get("arguments")
    if not isinstance(arguments, dict) or not isinstance(arguments.get("code"), str):
        return ParseFailure("the argument code is missing or not a string")
    stdin = arguments.get("input", "")
    if not isinstance(stdin, str):
        return ParseFailure("the argument input is not a string")
    return ToolCall(arguments["code"], stdin)


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


def final_answer(text: str) -> str | None:
    """The last complete answer block with its tags, or None."""
    found = _ANSWER.findall(text)
    return f"<answer>{found[-1]}</answer>" if found else None
