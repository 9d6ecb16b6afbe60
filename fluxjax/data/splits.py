"""Chooses the parquet files of a folder that are one split of one data set, by their names, as the hub has them."""

import logging
import posixpath
import re
from collections.abc import Sequence

from ..base.errors import DataError
from .locations import is_folder, joined, matching, parent

log = logging.getLogger("fluxjax.data")
_SPLITS = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
_SPLITS |= {"testing": "test", "eval": "test", "evaluation": "test"} | {n: n for n in ("train", "validation", "test")}
_WORD = re.compile(rf"(?<![a-z])({'|'.join(_SPLITS)})(?![a-z])")
_FOLDERS = {"", "data", "default"}  # whose names tell no subset of a data set from another


def split_of(path: str) -> str:
    """The split that a path names, its last part before the folders of that; empty where none does."""
    words = (_WORD.search(part) for part in reversed(path.lower().split("/")))
    return next((_SPLITS[word[1]] for word in words if word), "")


def chosen_files(path: str, held_out: bool = False) -> list[str]:
    """The parquet files that a folder, or a pattern of names, stands for, in the order of their names. Of several
    splits it is the one to train on, or with `held_out` the one that is not.

    Raises `DataError` where that is not clear, and OSError.
    """
    if "*" in posixpath.basename(path) and not is_folder(path):
        if not (names := matching(parent(path), posixpath.basename(path))):
            raise DataError(f"{path}: no file has such a name")
        if len(splits := {split_of(name) for name in names}) > 1:
            log.warning("%s: all of the splits %s are read (%d files)", path, _listed(splits), len(names))
        return [joined(parent(path), name) for name in names]
    if not (names := matching(path, "*.parquet") or matching(path, "**/*.parquet")):
        raise DataError(f"{path}: the folder has no .parquet files")
    splits = {split_of(name) for name in names}
    meant = [split for split in splits if split and (split != "train") == held_out] if len(splits) > 1 else [*splits]
    found = _listed(splits)
    if len(meant) != 1:
        order = ("test", "validation", "", "train") if held_out else ("", "validation", "test")
        example = _example(path, names, min(splits, key=order.index))
        raise DataError(f"{path}: the files are of the splits {found}; name those that are meant, as in {example}")
    names = [name for name in names if split_of(name) == meant[0]]
    if len(subsets := {_subset(name) for name in names}) > 1:
        example = joined(path, posixpath.dirname(names[-1]))
        raise DataError(f"{path}: the folder has the subsets {', '.join(sorted(subsets))}; give one, as in {example}")
    if len(splits) > 1:
        log.warning("%s: of the splits %s, %s is read (%d files)", path, found, meant[0], len(names))
    return [joined(path, name) for name in names]


def _subset(name: str) -> str:
    return "/".join(part for part in name.split("/")[:-1] if part not in _FOLDERS and not split_of(part)) or "."


def _listed(splits: set[str]) -> str:
    return ", ".join(sorted(split or "(none)" for split in splits))


def _example(path: str, names: Sequence[str], split: str) -> str:
    """Returns a path that stands for the files of one split, or else for the first of them."""
    meant = [name for name in names if split_of(name) == split]
    folder, first = posixpath.split(meant[0])
    word = _WORD.search(first.lower())
    start = first[: word.end()] if word else posixpath.commonprefix([posixpath.basename(name) for name in meant])
    for ending, pattern in (("", "*.parquet"), (f"{start}*.parquet",) * 2):
        if (folder or ending) and [posixpath.join(folder, n) for n in matching(joined(path, folder), pattern)] == meant:
            return joined(path, posixpath.join(folder, ending))
    return joined(path, meant[0])
