"""A version of the weights as servers of this host read it: a checkpoint folder in shared memory, with checksums."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

import models
from models.config import AnyConfig
from models.folder import write_json
from models.hf import SINGLE, disk_tensors, stored, write_weights
from models.hf_config import write_config

from ..engine_weights import by_name, check_shapes, served
from .checksums import Checksums

SHARED_MEMORY = pathlib.Path("/dev/shm")
PREFIX = "fluxjax-weights-"


@dataclasses.dataclass(frozen=True, eq=False)
class Published:
    version: int
    folder: pathlib.Path
    checksums: Checksums
    bytes: int


class SharedFolders:
    """Writes versions into shared memory (a temporary folder where there is none), each once. From any thread.

    `dtype` is what servers compute in: weights are cast on their way. `close` removes everything.
    """

    def __init__(self, config: AnyConfig, dtype: DTypeLike) -> None:
        self._config, self._dtype = served(config), np.dtype(dtype)
        where = scratch_folder()
        sweep(where, PREFIX)
        self._root = pathlib.Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
        weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)  # at the latest when Python ends
        self._written: list[tuple[Published, list[weakref.ref[Any]]]] = []  # and the arrays that each is made of
        self._count = 0
        self._lock = threading.Lock()

    def write(self, version: int, params: Mapping[str, Any]) -> Published:
        """Writes one tensor after the other; not again, where these very arrays were written as this version. Blocks.

        Raises EngineError for weights of another model, which servers might take or die of, and OSError, which names
        the folder, where there is no room; nothing of the version is left then.
        """
        with self._lock:
            arrays = jax.tree.leaves(params)
            for published, seen in self._written:
                if published.version == version and all(
                    ref() is array for ref, array in zip(seen, arrays, strict=True)
                ):
                    return published
            self._count += 1
            published = self._write(self._root / f"v{version}-{self._count}", version, params)
            self._written.append((published, list(map(weakref.ref, arrays))))
            return published

    def _write(self, folder: pathlib.Path, version: int, params: Mapping[str, Any]) -> Published:
        check_shapes(by_name(models.split(models.abstract(self._config))[1]), by_name(dict(params)))
        contents = stored(self._config, dict(params), self._dtype)
        size = sum(tensor.nbytes for tensor in contents)
        free = shutil.disk_usage(self._root).free
        if size > free:
            raise OSError(
                f"{folder}: version {version} needs {size / 2**20:.0f} MiB of shared memory, {free / 2**20:.0f} are "
                "free; up to three versions are there at a time: raise the limit of /dev/shm (docker: --shm-size)"
            )
        tensors = (value.astype(self._dtype, copy=False) for _, value in disk_tensors(self._config, dict(params)))
        folder.mkdir(exist_ok=True)
        try:
            write_weights(folder / SINGLE, contents, tensors)
            write_json(folder / "config.json", write_config(self._config))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return Published(version, folder, Checksums(folder / SINGLE, self._config.text.num_kv_heads), size)

    def keep(self, wanted: Sequence[Published]) -> None:
        """Removes all versions but `wanted` and the newest of the rest, which a server that comes up may be reading."""
        with self._lock:
            unwanted = [published for published, _ in self._written if published not in wanted]
            for published in unwanted[:-1]:
                shutil.rmtree(published.folder, ignore_errors=True)
            self._written = [entry for entry in self._written if entry[0] not in unwanted[:-1]]

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def scratch_folder() -> pathlib.Path:
    """The folder in which a host puts weights for its servers: in memory, if there is a file system for it."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else pathlib.Path(tempfile.gettempdir())


def sweep(where: pathlib.Path, prefix: str) -> None:
    """Removes what killed runs left behind under `prefix` and their process ids: folders as large as the model."""
    for folder in where.glob(f"{prefix}*"):
        owner, _, rest = folder.name.removeprefix(prefix).partition("-")
        if "-" in rest:  # the prefix ends with a host's name, and this is another host, whose name begins like it
            continue
        if owner.isdecimal() and not pathlib.Path("/proc", owner).exists() and pathlib.Path("/proc").is_dir():
            shutil.rmtree(folder, ignore_errors=True)
