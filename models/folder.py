"""Checkpoint folders: reads and writes their JSON files, and explains how to get a folder that is missing."""

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from .config import JsonObject

HUB_ID = re.compile(r"(?!\.)[\w.-]+/[\w.-]+")  # as in Qwen/Qwen2.5-VL-3B-Instruct


class CheckpointError(ValueError):
    """A checkpoint can't be read. The message names the file, and the tensor if a tensor is at fault."""


def why_missing(path: str | os.PathLike[str]) -> str:
    """The error message for a `path` that is no folder; empty if `path` is a folder."""
    if pathlib.Path(path).is_dir():
        return ""
    name = os.fspath(path)
    if not HUB_ID.fullmatch(name):
        return f"{name}: no such folder"
    folder = name.split("/")[1]
    return (
        f"{name}: no such folder, and models are not downloaded by themselves; "
        f"if this is a Hub id: hf download {name} --local-dir {folder}, then give {folder}"
    )


@contextlib.contextmanager
def one_line(kind: type[ValueError]) -> Iterator[None]:
    """Turns an unexpected error in the block, as of a value of a wrong type, into an error of `kind`. OSErrors pass."""
    try:
        yield
    except (kind, OSError):
        raise
    except Exception as error:
        raise kind(f"some field has an impossible value: {error!r}"[:300]) from error


def read_json(path: pathlib.Path, *, needed: bool = False) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing and not `needed`. Raises CheckpointError for a missing
    file that is needed, and for a file without a JSON object."""
    if not needed and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder must hold it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def write_json(path: pathlib.Path, content: JsonObject) -> None:
    """Replaces the file in one step, so that nobody reads a half-written file."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)
