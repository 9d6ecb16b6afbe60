"""Tools: functions, and those of MCP servers (https://modelcontextprotocol.io). Their calls in a model's turn, in the
forms of Hermes (Qwen2.5, Qwen3) and of Qwen3.5:

<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
<tool_call><function=add><parameter=a>1</parameter></function></tool_call>
"""

import base64
import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..base.errors import ConfigError

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
    text, end = turn.split("</think>", 1)[-1], 0
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


class Tool(NamedTuple):
    """A tool, as OpenAI's list of tools describes it: `name`, `description`, and `parameters`, a JSON schema.
    `call(arguments, images)` returns its answer or an awaitable, and raises ValueError for wrong arguments; `images()`
    returns all images of the episode so far, of type `PIL.Image.Image`."""

    described: Mapping[str, Any]
    call: Callable[[Mapping[str, Any], Callable[[], list[Any]]], Any]


def function_tool(function: Callable[..., Any]) -> Tool:
    """Makes a tool of a function, with the schema of its signature and the description of its docstring. A parameter
    `images` is not the model's: it gets the images of the episode."""
    import pydantic

    known, empty = dict(inspect.signature(function, eval_str=True).parameters), inspect.Parameter.empty
    sees_images = known.pop("images", None) is not None
    types = {name: Any if p.annotation is empty else p.annotation for name, p in known.items()}
    fields: dict[str, Any] = {
        name: (types[name], ... if p.default is empty else p.default) for name, p in known.items()
    }
    model = pydantic.create_model(function.__name__, __config__=pydantic.ConfigDict(extra="forbid"), **fields)

    def call(arguments: Mapping[str, Any], images: Callable[[], list[Any]]) -> Any:
        try:
            values = dict(model.model_validate(arguments))
        except pydantic.ValidationError as error:
            wrong = (f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
            raise ValueError("; ".join(wrong)) from None
        return function(**values, **({"images": images()} if sees_images else {}))

    schema = model.model_json_schema()
    for part in (schema, *schema.get("properties", {}).values()):
        part.pop("title", None)  # the name once more
    described = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": schema}
    return Tool(described, call)


def mcp_tools(settings: Mapping[str, Any], stack: contextlib.ExitStack) -> list[Tool]:
    """Starts an MCP server, by settings of `mcp.StdioServerParameters`, and returns its tools. The server ends with the
    stack. Raises `ConfigError` if the command can't be started."""
    import mcp
    from anyio.from_thread import start_blocking_portal

    portal = stack.enter_context(start_blocking_portal())  # a client must be opened and closed by one task
    try:
        server = mcp.Client(mcp.stdio_client(mcp.StdioServerParameters(**settings)))
        client = stack.enter_context(portal.wrap_async_context_manager(server))
    except OSError as error:
        raise ConfigError(f"environment tools: the MCP server {dict(settings)} can't be started: {error}") from None

    def call(name: str, arguments: Mapping[str, Any], images: object) -> list[Any]:
        result = portal.call(client.call_tool, name, dict(arguments))
        answer = [base64.b64decode(p.data) if p.type == "image" else getattr(p, "text", p.type) for p in result.content]
        if result.is_error:
            raise ValueError("\n".join(map(str, answer)))
        return answer

    listed = portal.call(client.list_tools).tools
    described = [{"name": t.name, "description": t.description, "parameters": t.input_schema} for t in listed]
    return [Tool(tool, functools.partial(call, tool["name"])) for tool in described]
