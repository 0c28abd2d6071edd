"""The words around a model: prompt, tool calls, observations. Text to text; `rollout` keeps the tokens.

A turn of the assistant either holds one or more `<tool_call>` blocks, each a JSON object with `name` and `arguments`, or it is
the last one. A call that cannot be parsed goes back to the model as an observation and counts as its error.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

START, END = "<|im_start|>", "<|im_end|>"
TOOL = "execute_python_code_with_standard_io"
TAGS = (
    "<reason>",
    "</reason>",
    "<answer>",
    "</answer>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "\\boxed{",
)
# What every call begins and ends with, as the toy's demonstrations write it.
CALL_HEAD = f'{{"name": "{TOOL}", "arguments": {{"code": "'
CALL_TAIL = '", "input": ""}}'
CALL_TAIL_BROKEN = '", "input": "}'
CALL_PARTS = (CALL_HEAD, CALL_TAIL, CALL_TAIL_BROKEN)

SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The program."},
                "input": {"type": "string", "description": "Its standard input; may be empty."},
            },
            "required": ["code", "input"],
        },
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
QUESTION = {
    "full": "{problem}\n\nPut the final answer into \\boxed{{}} inside <answer> </answer>.",
    "short": "{problem}",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompt(problem: str, system: str, opening: str) -> str:
    """Everything before the model's first token."""
    question = QUESTION[system].format(problem=problem)
    return f"{START}system\n{SYSTEM[system]}{END}\n{START}user\n{question}{END}\n{START}assistant\n{opening}"


def observation(texts: list[str], opening: str) -> str:
    """What follows the assistant's `<|im_end|>`: a user turn with the tools' answers, and the next header."""
    answers = "\n".join(f"<tool_response>{harmless(text)}</tool_response>" for text in texts)
    return f"\n{START}user\n{answers}{END}\n{START}assistant\n{opening}"


def harmless(text: str) -> str:
    """A program's output must not be able to end its turn or to pose as an answer."""
    return re.sub(r"<(?=\|im_(?:start|end)\||/?(?:tool_response|tool_call|answer|reason)>)", "< ", text)


class ToolCall(NamedTuple):
    code: str
    stdin: str = ""


class ParseFailure(NamedTuple):
    why: str


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
    """The last complete answer block, tags included, or None."""
    found = _ANSWER.findall(text)
    return f"<answer>{found[-1]}</answer>" if found else None
