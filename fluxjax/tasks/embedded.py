"""The data sets of the embedded runs: real files, written once on this machine, from data inside installed packages.

    digits   PNG strips of handwritten digits to transcribe     1 to 12 digits
    pans     h264 clips panned over photographs                 left, right, up, down
    reverse  strings to write backwards                         text only
    lakes    maps of FrozenLake to walk over                    up to 4 x 4 fields
    tags     photographs with a digit on a small tag (JPEG)     to be enlarged by a tool
    sums     arithmetic                                         by a calculator

Each data set has a folder whose name contains a hash of its recipe: another recipe has another folder, and an existing
folder is never rebuilt. A folder is built completely or not at all: files are written to a temporary folder that is
renamed at the end. A killed build leaves only the temporary folder; the next build removes it. A file lock lets only
one process build at a time.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sharding.door import ByName

from ..base.errors import ConfigError, DataError
from ..base.process import cache_folder
from ..config.run_folder import lock_file

T = TypeVar("T")
Record: TypeAlias = Mapping[str, object]
Recipe: TypeAlias = Any  # a dataclass with `build`, such as `StringsRecipe`, and `enlarged` if `cell` concerns it
RECIPES: Mapping[str, Recipe] = ByName(
    __name__,
    {
        "digits": "digits:DigitsRecipe",
        "pans": "pans:PansRecipe",
        "reverse": "embedded:StringsRecipe",
        "lakes": "agents:LakesRecipe",
        "tags": "agents:TagsRecipe",
        "sums": "agents:SumsRecipe",
    },
    lambda recipe, name: recipe(),
)


def ensure(name: str, root: str | pathlib.Path = "", recipe: Recipe | None = None, cell: int = 0) -> pathlib.Path:
    """Returns the folder of an embedded data set (`train.jsonl`, `eval.jsonl`, media), built if it is missing. With
    `cell`, pictures are enlarged: a digit to a square of `cell` pixels a side, a clip's frame to `2 * cell` a side.
    Raises `ConfigError` for an unknown name, `DataError` if the data set cannot be written."""
    if name not in RECIPES:
        raise ConfigError(
            f"data.sources.{name} has no path and is no embedded data set; embedded are {', '.join(RECIPES)}"
        )
    chosen = recipe or RECIPES[name]
    chosen = chosen.enlarged(cell) if cell and hasattr(chosen, "enlarged") else chosen
    folder = (pathlib.Path(root).expanduser() if root else cache_folder()) / f"{name}-{digest(chosen)}"

    def write(temporary: pathlib.Path) -> None:
        chosen.build(temporary)
        (temporary / "recipe.json").write_text(json.dumps(dataclasses.asdict(chosen), indent=2) + "\n")

    build_once(folder, write)
    return folder


def digest(recipe: Recipe) -> str:
    """Returns 12 hexadecimal digits of a hash of the recipe, which determines the content."""
    text = json.dumps([type(recipe).__name__, dataclasses.asdict(recipe)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def build_once(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Creates `folder` by `write(temporary folder)`, unless `folder` exists already. Raises `DataError` if the disk is
    full or the folder cannot be written to; then there is no `folder`."""
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():  # another process built it while this one waited
                return
            prefix = f".{folder.name}.building-"
            for dead in folder.parent.glob(f"{prefix}*"):  # left by killed builds, since this process holds the lock
                shutil.rmtree(dead, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as name:
                temporary = pathlib.Path(name)
                write(temporary)
                temporary.chmod(0o755)  # a temporary folder is private; the cache may be shared
                temporary.rename(folder)
    except OSError as error:
        raise DataError(_explain(folder, error)) from error


def _explain(folder: pathlib.Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason += "; free some space, or choose another place with XDG_CACHE_HOME=FOLDER"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        reason += "; choose another place with XDG_CACHE_HOME=FOLDER"
    return f"the embedded data set cannot be built in {folder}: {reason}"


def write_manifest(path: pathlib.Path, records: Iterable[Record]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_parts(folder: pathlib.Path, items: Sequence[T], held_out: int, record: Callable[[str, T], Record]) -> None:
    """Writes `record(id, item)` of the first `held_out` items to `eval.jsonl`, of all others to `train.jsonl`."""
    for name, part in (("train", items[held_out:]), ("eval", items[:held_out])):
        write_manifest(folder / f"{name}.jsonl", (record(f"{name}-{n:05d}", item) for n, item in enumerate(part)))


def write_manifests(
    folder: pathlib.Path, title: str, make: Callable[[str, int], Record], sizes: Mapping[str, int]
) -> list[Record]:
    """Writes `NAME.jsonl` with `size` records `make(NAME, index)` for each name and size; returns all records. Threads
    make the records; the first error ends the work. stderr shows progress: a bar on a terminal, else four lines."""
    tasks = [(name, index) for name, size in sizes.items() for index in range(size)]
    quarter = math.ceil(len(tasks) / 4)
    records: list[Record] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="build") as pool, bar:
        shown = bar.add_task(title, total=len(tasks))
        for record in pool.map(lambda task: make(*task), tasks):
            records.append(record)
            bar.advance(shown)
            if bar.disable and (len(records) % quarter == 0 or len(records) == len(tasks)):
                print(f"{title}: {len(records)}/{len(tasks)}", file=sys.stderr, flush=True)
    written = iter(records)
    for name, size in sizes.items():
        write_manifest(folder / f"{name}.jsonl", itertools.islice(written, size))
    return records


@dataclasses.dataclass(frozen=True)
class StringsRecipe:
    """A text-only task: write a string backwards."""

    version: int = 1  # grows when the code below changes the data
    seed: int = 0
    train: int = 2000  # records
    held_out: int = 200
    letters: str = "abcdef"
    max_length: int = 5
    question: str = "Reverse {}:"

    def build(self, folder: pathlib.Path) -> None:
        """Writes `train.jsonl` and `eval.jsonl`, disjoint. Lengths are equally frequent until short strings run out."""
        rng = np.random.default_rng(self.seed)
        by_length = []
        for length in range(1, self.max_length + 1):
            words = ["".join(letters) for letters in itertools.product(self.letters, repeat=length)]
            by_length.append([words[i] for i in rng.permutation(len(words))])
        words = [word for round_ in itertools.zip_longest(*by_length) for word in round_ if word is not None]
        words = words[: self.train + self.held_out]
        words = [words[i] for i in rng.permutation(len(words))]

        def record(id: str, word: str) -> Record:
            return {"id": id, "prompt": self.question.format(word), "answer": word[::-1]}

        write_parts(folder, words, self.held_out, record)
