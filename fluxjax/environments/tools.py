"""An environment that answers the calls of tools in a model's turns."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from models.processing.images import load_image
from models.processing.media_file import MediaError
from sharding.door import ByName

from ..base.errors import ConfigError, DataError, said
from ..base.import_path import imported
from ..base.medium import Media, MediaKind
from ..base.scored import Prompt
from ..config.bounds import check_fields, positive
from ..data.tickets import source_of
from .observation import Observation, as_json
from .tool_calls import Tool, ToolCall, find_calls, function_tool, mcp_tools

_READY = ("calculator", "crop", "zoom", "draw", "python")
TOOLS: Mapping[str, Any] = ByName(__name__, {name: f"ready_tools:{name}" for name in _READY})
_PICTURES = (Image.Image, np.ndarray, bytes)
_MOST_IMAGES = 8  # of an observation


@dataclasses.dataclass(eq=False)
class ToolEnvironment:
    """Answers the calls in a turn in order, each on lines of its own. A turn without a call ends the episode. An answer
    begins with `error:`, and is counted in `info`, if a call can't be read or names no tool (malformed), or if the tool
    refuses its arguments or raises ValueError, TypeError, ArithmeticError or LookupError (errors). All else that a tool
    raises fails the episode. A tool, which may be async, returns a text, an image, a list of texts and images, or other
    values of JSON. Raises `ConfigError` for a wrong setting."""

    # An entry is a name in `TOOLS`; the import path of a function; an entry of OpenAI's list of tools, with the `path`
    # of a function; or {"mcp": {"command": ..., "args": [...]}}, all tools of an MCP server.
    tools: list[Any] = dataclasses.field(default_factory=lambda: ["calculator"])
    instructions: str = ""  # what the model reads first
    describe: bool = False  # the model then reads OpenAI's list of the tools, one a line
    max_turns: int = positive(16)  # after which the episode is done
    calls: int = positive(8)  # of a turn that are answered
    characters: int = positive(4096)  # of a text in an answer; the rest is left out
    demonstration: str = ""  # import path of a function: (prompt, number of turns before) -> the text of a good turn

    def __post_init__(self) -> None:
        check_fields(self, "environment tools: ")
        self._servers = contextlib.ExitStack()

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        try:
            found = [tool for entry in self.tools for tool in self._found(entry)]
        except ImportError as error:
            raise ConfigError(f"environment tools: {error}; pip install 'fluxjax[environments]'") from None
        self._images: list[Any] = [medium for medium in prompt.media if medium.kind is MediaKind.IMAGE]
        self._prompt, self._turns = prompt, 0
        self._tools = {tool.described["name"]: tool for tool in found}
        if len(self._tools) < len(found):
            raise ConfigError(f"environment tools: tools has several tools of one name: {', '.join(self._tools)}")
        listed = [as_json({"type": "function", "function": tool.described}) for tool in found if self.describe]
        return Observation("\n".join(filter(None, (self.instructions, *listed))))

    async def step(self, text: str) -> Observation:
        self._turns += 1
        found = list(itertools.islice(find_calls(text), self.calls + 1))
        info, lines, images = {"calls": len(found), "malformed": 0, "errors": 0}, list[str](), list[Any]()
        if not found or self._turns >= self.max_turns:
            return Observation(done=True, info=info)
        for call in found[: self.calls]:
            for part in await self._answer(call, info):
                if not isinstance(part, _PICTURES):
                    lines.append(self._plain(part if isinstance(part, str) else as_json(part)))
                elif len(images) < _MOST_IMAGES:
                    lines.append("<image>")
                    images.append(part)
        if len(found) > self.calls:
            lines.append(f"error: only {self.calls} calls of a turn are answered")
        self._images += images
        return Observation("\n".join(lines), images, info=info)

    def demonstrate(self) -> str:
        """Returns the text of a good turn. Raises `ConfigError` without a `demonstration`."""
        function = imported(self.demonstration, "environment tools: demonstration", callable)
        return function(self._prompt, self._turns)

    def close(self) -> None:
        self._servers.close()

    def _found(self, entry: Any) -> list[Tool]:
        match entry:
            case str() if entry in TOOLS:
                return [function_tool(TOOLS[entry])]
            case str(path) if ":" in path:
                return [function_tool(imported(path, "environment tools: tools", callable))]
            case {"function": {"name": _, "parameters": {}} as described, "path": str(path)}:
                return [Tool(described, self._found(path)[0].call)]
            case {"mcp": {"command": str()} as settings}:
                return mcp_tools(settings, self._servers)
        forms = "module:function, OpenAI's entry with a path, or {'mcp': {'command': ...}}"
        raise ConfigError(f"environment tools: tools has {entry!r}; it must have {', '.join(TOOLS)}, {forms}")

    async def _answer(self, call: ToolCall, info: dict[str, int]) -> list[Any]:
        """Returns the texts, images and other values that answer a call."""
        if call.wrong or call.name not in self._tools:
            info["malformed"] += 1
            return [f"error: {call.wrong or f'no tool is named {call.name}'}; the tools are {', '.join(self._tools)}"]
        tool, opened = self._tools[call.name], lambda: [*map(_opened, self._images)]
        known = tool.described["parameters"].get("properties", {})
        try:
            answer = tool.call({name: _value(v, known.get(name)) for name, v in call.arguments.items()}, opened)
            answer = await answer if inspect.isawaitable(answer) else answer
        except (ConfigError, DataError, MediaError):
            raise
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            info["errors"] += 1
            return [f"error: {error if type(error) is ValueError else said(error)}"]
        parts = answer if isinstance(answer, list | tuple) else [answer]
        return [*parts] if parts and all(isinstance(part, (str, *_PICTURES)) for part in parts) else [answer]

    def _plain(self, text: str) -> str:
        """Returns the text without halves of surrogate pairs and without marks of media, up to its bound."""
        rest = f"... ({len(text)} characters)" if len(text) > self.characters else ""
        text = text[: self.characters].encode(errors="replace").decode()
        return re.sub("<(image|video)>", r"[\1]", text) + rest


def _value(value: Any, schema: Any) -> Any:
    """Returns the value, or what a text means as JSON if the schema allows no text."""
    if isinstance(value, str) and '"string"' not in json.dumps(schema):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _opened(image: Any) -> Image.Image:
    if isinstance(image, Media | bytes):
        return load_image(source_of(image) if isinstance(image, Media) else image)
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image
