"""Chat templates of checkpoints, rendered the way transformers renders them."""

import datetime
import functools
import json
import pathlib
from collections.abc import Sequence

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ..config import JsonObject
from ..folder import read_json
from .media_file import PromptError


def find_template(folder: pathlib.Path) -> str:
    """The checkpoint's chat template, or "" if it has none. Files are tried in the order of transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(folder / "chat_template.json").get("chat_template")
    template = template or read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry["name"] == "default"), "")
    return template or ""


class _Generation(jinja2.ext.Extension):
    """The tag around an assistant's turns, which training code reads. Here its content is rendered like any other."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def render(template: str, messages: Sequence[JsonObject], **variables: str) -> str:
    """The conversation as text, up to the assistant's answer. Raises PromptError if the template refuses it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja2's escapes HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return environment.from_string(template).render({**variables, **given})
    except Exception as error:  # a template may raise anything, for example for a medium where it expects a text
        text = " ".join(str(error).split())
        raise PromptError(f"the chat template refuses the prompt: {text}", "the chat template refuses it") from error
