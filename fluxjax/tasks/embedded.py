"""The data sets of the embedded runs: real files, written once on this machine, from data inside installed packages.

    digits   PNG strips of handwritten digits to transcribe     1 to 12 digits
    pans     h264 clips panned over photographs                 left, right, up, down
    reverse  strings to write backwards                         text only

Each data set has a folder whose name contains a hash of its recipe: another recipe has another folder, and an existing
folder is never rebuilt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from sharding.door import ByName

from ..base.errors import ConfigError
from ..base.process import cache_folder
from .building import build_once

if TYPE_CHECKING:
    from .digits import DigitsRecipe
    from .pans import PansRecipe
    from .strings import StringsRecipe

    Recipe: TypeAlias = DigitsRecipe | PansRecipe | StringsRecipe

RECIPES: Mapping[str, Recipe] = ByName(
    __name__,
    {"digits": "digits:DigitsRecipe", "pans": "pans:PansRecipe", "reverse": "strings:StringsRecipe"},
    lambda recipe, name: recipe(),
)


def ensure(name: str, root: str | pathlib.Path = "", recipe: Recipe | None = None, cell: int = 0) -> pathlib.Path:
    """Returns the folder of an embedded data set (`train.jsonl`, `eval.jsonl`, media), built if it is missing.

    With `cell`, pictures are enlarged until a digit is a square of `cell` pixels. Raises `ConfigError` for an unknown
    name, `DataError` if the data set cannot be written.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"data.sources.{name} has no path and is no embedded data set; embedded are {', '.join(RECIPES)}"
        )
    chosen = recipe or RECIPES[name]
    chosen = chosen.enlarged(cell) if cell else chosen
    folder = (pathlib.Path(root).expanduser() if root else cache_folder()) / f"{name}-{digest(chosen)}"

    def write(temporary: pathlib.Path) -> None:
        chosen.build(temporary)
        (temporary / "recipe.json").write_text(json.dumps(dataclasses.asdict(chosen), indent=2) + "\n")

    build_once(folder, write)
    return folder


def digest(recipe: Recipe) -> str:
    """Returns 12 hexadecimal digits of a hash of everything that determines the content."""
    text = json.dumps([type(recipe).__name__, dataclasses.asdict(recipe)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
