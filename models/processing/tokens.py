"""Reads tokenizers and chat templates of a checkpoint folder, and renders templates, as transformers does."""

from __future__ import annotations

import datetime
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer

from ..config import JsonObject
from ..folder import read_json
from .media_file import PromptError

if TYPE_CHECKING:
    import jinja2.nodes
    import jinja2.parser


def read_settings(folder: pathlib.Path) -> JsonObject:
    """The settings of tokenizer_config.json and, if it has no `added_tokens_decoder`, of two older files."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json")
        if ids := read_json(folder / "added_tokens.json"):
            settings["added_tokens_decoder"] = {str(id): {"content": token} for token, id in ids.items()}
    return settings


def load_tokenizer(folder: pathlib.Path, settings: JsonObject) -> Tokenizer:
    """The tokenizer of a folder's tokenizer.json, with the tokens that only `settings` name. Each such token gets the
    next free id, whatever id the settings have, as in transformers. Raises FileNotFoundError or ValueError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    # The file may store truncation and padding of somebody's last batch, which would cut or fill up every prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    stored = list(tokenizer.get_added_tokens_decoder().values())
    try:
        described = settings.get("added_tokens_decoder") or {}
        tokens = [AddedToken(**described[id]) for id in sorted(described, key=int)]
        contents = {token.content for token in (*stored, *tokens)}
        more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
        names = [name for name in more if isinstance(name, str)] if isinstance(more, list) else []
        tokens += [AddedToken(name, special=True) for name in names if name not in contents]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'tokenizer_config.json'}: added tokens cannot be read: {error}") from error
    tokenizer.add_tokens([token for token in tokens if token not in stored])
    return tokenizer


def named_tokens(settings: JsonObject) -> dict[str, str]:
    """The special tokens that have a name, such as `bos_token`. A file has a text or a dictionary for each token."""
    entries = ((name, entry.get("content") if isinstance(entry, dict) else entry) for name, entry in settings.items())
    return {name: token for name, token in entries if name.endswith("_token") and token and isinstance(token, str)}


def find_template(folder: pathlib.Path) -> str:
    """The checkpoint's chat template, or "" if it has none. Files are tried in the order of transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(folder / "chat_template.json").get("chat_template")
    template = template or read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # templates by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), "")
    return template or ""


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment in which templates are rendered, as in transformers."""
    import jinja2.ext  # importing takes 0.1 s
    import jinja2.nodes
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """The tag around an assistant's messages, which is rendered as if it were not there."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Scope:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja2's filter escapes HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def render(template: str, messages: Sequence[JsonObject], **variables: str) -> str:
    """The conversation as text, up to the assistant's answer. Raises PromptError if the template raises an error."""
    given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return _environment().from_string(template).render({**variables, **given})
    except Exception as error:  # a template may raise anything, for example for a medium where it expects a text
        text = " ".join(str(error).split())
        raise PromptError(f"the chat template refuses the prompt: {text}", "the chat template refuses it") from error
