"""Chat templates of checkpoints, rendered the way transformers renders them."""

import datetime
import json
import pathlib
from collections.abc import Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

from ..config import JsonObject
from ..folder import read_json


def find_template(folder: pathlib.Path) -> str:
    """The checkpoint's chat template, or "" if it has none. Files are tried in the order of transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(folder / "chat_template.json").get("chat_template")
    template = template or read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template or ""


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)  # unlike jinja2's own, no HTML escapes


def render(template: str, messages: Sequence[JsonObject], **variables: str) -> str:
    """The conversation as text, open for the assistant's answer. Raises ValueError if the template refuses it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **variables)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses the prompt: {error}") from error
