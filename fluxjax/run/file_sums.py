"""Checksums of all files of a checkpoint: written before it gets its final name, compared before it is restored."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import orbax.checkpoint as ocp
import xxhash

SUMS = "checksums.json"
NO_SUMS = f"{SUMS} is missing"
_THREADS = 8  # that read files: xxHash lets go of the interpreter


class SummedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The folder of a checkpoint that is being written. Orbax completes it under one more temporary name; it gets its
    final name when all of its files could be read back, are on the disk, and have checksums."""

    async def finalize(self) -> None:
        final = self.get_final()
        if not final.name.isdecimal():  # a part of a checkpoint
            return await super().finalize()
        self._final_path = complete = self.get().with_name(f"{self.get().name}-complete")
        await super().finalize()
        self._final_path = final
        await asyncio.to_thread(write_sums, pathlib.Path(complete))
        await asyncio.to_thread(os.rename, complete, final)


def write_sums(folder: pathlib.Path) -> None:
    """Writes the xxh3-128 of every file below `folder`, and brings the files to the disk. Raises OSError if a file
    can't be read."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = threads.map(functools.partial(_digest, sync=True), files)
        sums = {str(file.relative_to(folder)): digest for file, digest in zip(files, digests, strict=True)}
    (folder / SUMS).write_text(json.dumps(sums))
    _digest(folder / SUMS, sync=True)


def damage(folder: pathlib.Path) -> str:
    """Returns the name of a file below `folder` that is not as `write_sums` saw it, and what is wrong with it; nothing
    if all are as they were. Files that came later do not count."""
    try:
        sums = json.loads((folder / SUMS).read_bytes())
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = threads.map(_digest, [folder / name for name in sums])
            wrong = (name for name, digest in zip(sums, digests, strict=True) if digest != sums[name])
            return next((f"{name} has another checksum than {SUMS} says" for name in wrong), "")
    except FileNotFoundError as error:
        return f"{pathlib.Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        return f"{error.filename} can't be read: {error.strerror}"
    except (ValueError, TypeError):
        return f"{SUMS} is damaged"


def _digest(file: pathlib.Path, *, sync: bool = False) -> str:
    with file.open("rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
