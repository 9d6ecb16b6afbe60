"""Finds calls of tools in a model's turn, in the forms of Hermes (Qwen2.5, Qwen3) and of Qwen3.5:

<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
<tool_call><function=add><parameter=a>1</parameter></function></tool_call>
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .observation import spoken

_OPEN, _CLOSE = re.compile(r"<tool_call>\s*"), re.compile(r"\s*</tool_call>")
_FUNCTION = re.compile(r"<function=([^<>\n]+)>\s*")
# A value may contain tags: it ends where the next tag follows.
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)


class ToolCall(NamedTuple):
    """A call in a turn. If it can't be read, `wrong` says why. Arguments of Qwen3.5's form are texts."""

    name: str
    arguments: dict[str, Any]
    wrong: str = ""


def find_calls(turn: str) -> Iterator[ToolCall]:
    """Yields the calls in a turn, behind its reasoning, in order."""
    text, end = spoken(turn), 0
    for opened in _OPEN.finditer(text):
        if opened.start() < end:  # within an argument
            continue
        try:
            name, arguments, behind = _read(text, opened.end())
            if (closed := _CLOSE.match(text, behind)) is None:
                raise ValueError("</tool_call> is missing")
            end = closed.end()
            yield ToolCall(name, arguments)
        except (ValueError, RecursionError) as error:
            yield ToolCall("", {}, error.msg if isinstance(error, json.JSONDecodeError) else str(error))


def _read(text: str, at: int) -> tuple[str, dict[str, Any], int]:
    """Returns the name, the arguments and the end of the call that begins at `at`. Raises ValueError."""
    if (tag := _FUNCTION.match(text, at)) is None:
        match json.JSONDecoder().raw_decode(text, at):
            case {"name": str(name), "arguments": dict(arguments)}, int(end):
                return name, arguments, end
        raise ValueError('a call must be like {"name": "TOOL", "arguments": {"NAME": VALUE}}')
    name, arguments = tag[1], {}
    while tag:
        at = tag.end()
        if tag := _PARAMETER.match(text, at):
            arguments[tag[1]] = tag[2]
    if not text.startswith("</function>", at):
        raise ValueError("a call must be like <function=TOOL><parameter=NAME>VALUE</parameter></function>")
    return name, arguments, at + len("</function>")
