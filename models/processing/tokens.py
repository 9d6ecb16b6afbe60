"""Tokenizers of checkpoint folders, put together from their several files as transformers puts them together."""

import pathlib

from tokenizers import AddedToken, Tokenizer

from ..config import JsonObject
from ..folder import read_json


def read_settings(folder: pathlib.Path) -> JsonObject:
    """The settings of a folder's tokenizer: tokenizer_config.json, and the older files that it takes the place of once
    it says `added_tokens_decoder`. Raises CheckpointError."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    ids = read_json(folder / "added_tokens.json")
    added = {str(id): {"content": content, "special": False} for content, id in ids.items()}
    return settings | read_json(folder / "special_tokens_map.json") | ({"added_tokens_decoder": added} if added else {})


def load_tokenizer(folder: pathlib.Path, settings: JsonObject) -> Tokenizer:
    """The tokenizer of a folder's tokenizer.json, with the tokens of `settings`. Raises FileNotFoundError or
    ValueError, which name the file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    # The file may store those of the last batch that somebody encoded: they would cut or fill up every prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        tokenizer.add_tokens(_missing(tokenizer, settings))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder / 'tokenizer_config.json'}: added tokens cannot be read: {error}") from error
    return tokenizer


def named_tokens(settings: JsonObject) -> dict[str, str]:
    """The special tokens that have a name, such as `bos_token`: those that there are."""
    return {name: token for name, entry in settings.items() if name.endswith("_token") and (token := _content(entry))}


def _content(entry: object) -> str:
    """A special token as the files have it: text, or a dictionary with its content. Empty where it is neither."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


def _missing(tokenizer: Tokenizer, settings: JsonObject) -> list[AddedToken]:
    """The tokens that only `settings` name, or that they describe otherwise. Each gets the next free id, whatever id
    stands there, as in transformers."""
    stored = list(tokenizer.get_added_tokens_decoder().values())
    described = settings.get("added_tokens_decoder") or {}
    tokens = [AddedToken(**described[id]) for id in sorted(described, key=int)]
    contents = {token.content for token in (*stored, *tokens)}
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    special = [_content(entry) for entry in more] if isinstance(more, list) else []
    missing = [AddedToken(content, special=True) for content in special if content and content not in contents]
    return [token for token in tokens if token not in stored] + missing
