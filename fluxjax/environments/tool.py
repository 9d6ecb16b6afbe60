"""Tools that a model can call: Python functions, and the tools of MCP servers (https://modelcontextprotocol.io)."""

import base64
import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..base.errors import ConfigError


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

    hints, known = typing.get_type_hints(function, include_extras=True), dict(inspect.signature(function).parameters)
    sees_images = known.pop("images", None) is not None
    fields: dict[str, Any] = {
        name: (hints.get(name, Any), ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in known.items()
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
        server = mcp.Client(mcp.StdioServerParameters(**settings))
        client = stack.enter_context(portal.wrap_async_context_manager(server))
    except OSError as error:
        raise ConfigError(f"environment tools: the MCP server {dict(settings)} can't be started: {error}") from None

    def call(name: str, arguments: Mapping[str, Any], images: object) -> list[Any]:
        result = portal.call(client.call_tool, name, dict(arguments))
        answer = [base64.b64decode(p.data) if p.type == "image" else getattr(p, "text", p.type) for p in result.content]
        if result.is_error:
            raise ValueError("\n".join(map(str, answer)))
        return answer

    return [
        Tool(
            {"name": t.name, "description": t.description, "parameters": t.input_schema},
            functools.partial(call, t.name),
        )
        for t in portal.call(client.list_tools).tools
    ]
