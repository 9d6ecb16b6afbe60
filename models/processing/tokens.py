"""Tokenizers of checkpoint folders, put together from their several files as transformers puts them together."""

import pathlib

from tokenizers import AddedToken, Tokenizer

from ..config import JsonObject
from ..folder import read_json


def read_settings(folder: pathlib.Path) -> JsonObject:
    """tokenizer_config.json; if that lacks `added_tokens_decoder`, with the older files that have its settings."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json")
        if ids := read_json(folder / "added_tokens.json"):
            settings["added_tokens_decoder"] = {str(id): {"content": token} for token, id in ids.items()}
    return settings


def load_tokenizer(folder: pathlib.Path, settings: JsonObject) -> Tokenizer:
    """The tokenizer of a folder's tokenizer.json, with the tokens that only `settings` name. Each of those gets the
    next free id, whatever id is written there, as in transformers. Raises FileNotFoundError or ValueError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    # The file may store truncation and padding of somebody's last batch: they would cut or fill up every prompt.
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
    """The special tokens that have a name, such as `bos_token`. The files have them as texts or as dictionaries."""
    entries = ((name, entry.get("content") if isinstance(entry, dict) else entry) for name, entry in settings.items())
    return {name: token for name, token in entries if name.endswith("_token") and token and isinstance(token, str)}
