"""Checkpoints with Orbax: written asynchronously and atomically, and restored onto any mesh.

A checkpoint holds all that decides the rest of the run: arrays (parameters, optimizer state) and a JSON part
(coordinator, data position, weight version, counts of the summary). Checksums of all files are written before it gets
its final name, until which older ones stay. A run compares the checksums before it restores a checkpoint.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
import xxhash
from jaxtyping import PyTree

log = logging.getLogger(__name__)
SUMS = "checksums.json"
NO_SUMS = f"{SUMS} is missing"
_THREADS = 8  # threads that read files; xxHash releases the interpreter's lock


class ResumeError(RuntimeError):
    """A checkpoint can't be written or read. The message names the folder, the cause and what to do."""


class Checkpoints:
    """The checkpoints of one run, in `folder/<step>/`. An unfinished checkpoint has another name."""

    def __init__(self, folder: pathlib.Path, keep: int, *, read_only: bool = False, largest: int = 0) -> None:
        """`read_only` leaves all files unchanged, since a run may still be writing. `largest` is the size of the
        largest array, in bytes. About as many bytes, or 1 GB if that is more, are encoded or decoded at a time, to
        bound the host memory. Raises `ResumeError` if the folder cannot be created."""
        self.folder = folder.absolute()
        self._at_once = math.ceil(max(1.1 * largest, _LEAST_AT_ONCE) / 1e9)  # Orbax counts in GB
        self._keep = keep
        self._read_only = read_only
        self.failed: list[str] = []  # reasons, one for each checkpoint that could not be written
        self._damage: dict[int, str] = {}  # by step: the damage of each checkpoint that was read, "" for none
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=not self._read_only,
            cleanup_tmp_directories=not self._read_only,
            read_only=self._read_only,
            temporary_path_class=SummedPath,
            lightweight_initialize=True,  # otherwise damaged metadata of a checkpoint would end the run
        )
        arrays = ocp.StandardCheckpointHandler(save_concurrent_gb=self._at_once, restore_concurrent_gb=self._at_once)
        handlers = {"arrays": arrays, "state": ocp.JsonCheckpointHandler()}
        try:
            return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except OSError as error:
            raise ResumeError(f"cannot create {self.folder}: {error.strerror}; set run_dir elsewhere") from error

    def holds(self, part: str) -> bool:
        """Says whether the newest undamaged checkpoint has arrays of this name. False without checkpoints."""
        step = self.undamaged()
        metadata = None if step is None else self._manager.item_metadata(step)["arrays"]
        return metadata is not None and part in metadata.tree

    def undamaged(self) -> int | None:
        """Waits for a write under way. Returns the newest step whose checkpoint is undamaged, or None if there are no
        checkpoints. Logs each newer checkpoint with its damaged file. If no checkpoint has the right checksums, returns
        the newest step without checksums, which is from an earlier release. Raises `ResumeError` if all are damaged."""
        self.wait()
        steps = self._there()
        for step in steps:
            if not self._look(step):
                return step
        if not steps:
            return None
        for step in (step for step in steps if self._damage[step] == NO_SUMS):
            log.warning("the checkpoint of step %d has no checksums and is taken unchecked", step)
            return step
        raise ResumeError(f"every checkpoint in {self.folder} is damaged; restore the files, or remove this folder")

    def chosen(self, asked: int | None = None) -> int:
        """Returns the step to restore, which is `asked`, or else that of `undamaged`. Raises `ResumeError` if that
        checkpoint is damaged, or if nothing was asked and there are no checkpoints."""
        step = self.undamaged() if asked is None else asked
        if step is None:
            raise ResumeError(f"there is no checkpoint in {self.folder}")
        self.wait()
        if step in self._there() and self._look(step) not in ("", NO_SUMS):
            raise ResumeError(f"the checkpoint {self.folder / str(step)} is damaged: {self._damage[step]}")
        return step

    def _there(self) -> list[int]:
        """Returns the steps that have a folder, the newest first, even damaged ones, which Orbax does not list."""
        names = (path.name for path in self.folder.iterdir()) if self.folder.is_dir() else ()
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _look(self, step: int) -> str:
        if step not in self._damage:
            self._damage[step] = reason = damage(self.folder / str(step))
            if reason:
                log.warning("the checkpoint of step %d in %s is passed over: %s", step, self.folder, reason)
        return self._damage[step]

    def may_save(self, step: int, arrays: PyTree) -> bool:
        """Waits for the write under way. Says whether this step has no checkpoint and the disk has room for a
        checkpoint. A full disk is logged, and added to `failed`."""
        self.wait()
        if step in self._manager.all_steps():
            return False
        needed = sum(array.nbytes for array in jax.tree.leaves(arrays))
        if shutil.disk_usage(self.folder).free < needed + _MARGIN:  # Orbax would fail slowly and with many lines
            self._note_failure(OSError(errno.ENOSPC, f"No space left for {needed} bytes"))
            return False
        return True

    def write(self, step: int, arrays: PyTree, state: dict[str, Any]) -> None:
        """Starts writing, after `may_save` returned True. Returns when the arrays are copied and may be donated. Only
        the `state` of process 0 is written. Collective. A failure, such as a full disk, is logged and added to
        `failed`, and the run goes on. In a run of several processes, raises `ResumeError` instead."""
        args = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), state=ocp.args.JsonSave(state))
        try:
            self._damage.pop(step, None)
            self._manager.save(step, args=args, force=True)
        except _WRITE_ERRORS as error:
            self._begin_afresh(error)

    def copy_to(self, path: pathlib.Path) -> None:
        """Copies the newest undamaged checkpoint to `path/<step>/`. Raises `ResumeError` if it can't be written there,
        and if another checkpoint of this step is there."""
        step = self.chosen()
        self._copy(self.folder / str(step), path / str(step))

    def copy_from(self, path: pathlib.Path) -> int:
        """Copies a checkpoint, `path/<step>/` or `path` itself, to this run, and returns its step. Raises `ResumeError`
        if there is none or more than one, and if this run has another checkpoint of this step."""
        found = [path] if path.name.isdecimal() else [p for p in path.glob("*") if p.name.isdecimal()]
        if len(found) != 1 or not found[0].is_dir():
            raise ResumeError(f"{path} has {len(found)} checkpoints (folders named by a step); name the folder of one")
        self._copy(found[0], self.folder / found[0].name)
        self._manager.reload()
        return int(found[0].name)

    def _copy(self, source: pathlib.Path, to: pathlib.Path) -> None:
        part = to.with_name(f".{to.name}.{os.getpid()}.part")
        try:
            if to.exists():
                if (source / SUMS).read_bytes() != (to / SUMS).read_bytes():
                    raise ResumeError(f"{to} is another checkpoint of this step; choose another folder")
                return
            shutil.copytree(source, part)
            part.rename(to)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise ResumeError(f"the checkpoint {source} can't be copied to {to}: {error.strerror or error}") from error

    def forget_after(self, step: int) -> None:
        """Removes the checkpoints of later steps."""
        for later in sorted(self._manager.all_steps(), reverse=True):  # the newest first: a kill leaves no gap
            if later > step:
                self._manager.delete(later)
        for later in self._there() if jax.process_index() == 0 else ():
            if later > step:  # too damaged for Orbax to list
                shutil.rmtree(self.folder / str(later))

    def wait(self) -> bool:
        """Waits for the write under way. Returns False if the write failed."""
        try:
            self._manager.wait_until_finished()
        except _WRITE_ERRORS as error:
            self._begin_afresh(error)
            return False
        return True

    def restore(
        self, abstract: PyTree, step: int | None = None, make_room: Callable[[], None] = lambda: None
    ) -> tuple[int, PyTree, dict[str, Any]]:
        """Reads the checkpoint of `step` (default: the newest undamaged checkpoint) as `(step, arrays, state)`.
        `abstract` is a pytree of `ShapeDtypeStruct` with the shardings of this run. `make_room` is called after the
        arrays' shapes are checked, before any array is read. Raises `ResumeError` if there is no undamaged checkpoint,
        or if its arrays do not fit the model of the configuration."""
        self.wait()  # Orbax can't describe a checkpoint that is still being written
        step = self.chosen() if step is None else step
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract), state=ocp.args.JsonRestore())
        try:
            self._check_fits(step, abstract)  # before any array is read, because failed reads of Orbax log many lines
            make_room()
            restored = self._manager.restore(step, args=args)
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise ResumeError(
                f"the checkpoint {self.folder / str(step)} does not fit this configuration's model, or is damaged: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
        return step, restored["arrays"], restored["state"]

    def _check_fits(self, step: int, abstract: PyTree) -> None:
        metadata = self._manager.item_metadata(step)["arrays"]
        if metadata is None:
            raise ValueError("its arrays cannot be found")
        stored, wanted = _shapes(metadata.tree), _shapes(abstract)
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                has, wants = (shapes.get(name, "none") for shapes in (stored, wanted))
                raise ValueError(f"{name} has the shape {has} in the checkpoint, but {wants} in the model")

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def _note_failure(self, error: Exception) -> None:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error) or "ENOSPC" in str(error)
        reason = "the disk is full" if full else text
        self.failed.append(reason)
        kept = self._manager.latest_step()
        log.error(
            "checkpoint not written to %s: %s. %s The run goes on and tries again at the next checkpoint.",
            self.folder,
            reason,
            "No earlier checkpoint exists." if kept is None else f"The newest good one is step {kept}.",
        )

    def _begin_afresh(self, error: Exception) -> None:
        """Replaces the manager. The old one would report its failure again; a new one removes partial folders."""
        if jax.process_count() > 1:  # the other processes are still writing, and would wait for this one
            raise ResumeError(f"a checkpoint can't be written to {self.folder}: {error}") from error
        self._note_failure(error)
        self._manager = self._open()


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }


class SummedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The folder of a checkpoint that is being written. Orbax completes the folder under a second temporary name. The
    folder gets its final name when all files were read back, are on the disk, and have checksums."""

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
    """Writes the xxh3-128 of every file below `folder`, and flushes the files to the disk. Raises OSError."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = threads.map(functools.partial(_digest, sync=True), files)
        sums = {str(file.relative_to(folder)): digest for file, digest in zip(files, digests, strict=True)}
    (folder / SUMS).write_text(json.dumps(sums))
    _digest(folder / SUMS, sync=True)


def damage(folder: pathlib.Path) -> str:
    """Returns the name and the damage of a file below `folder` that has changed since `write_sums`, or ""."""
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


_LEAST_AT_ONCE = 1e9  # bytes of arrays
_MARGIN = 2**20  # bytes for metadata and many small files, beside the arrays
_WRITE_ERRORS = (OSError, ValueError, RuntimeError)


def _is_news(record: logging.LogRecord) -> bool:
    """Returns False for tracebacks through Orbax, whose hundreds of lines would hide the line of `_note_failure`."""
    trace = record.exc_info[2] if record.exc_info else None
    while trace is not None:
        if f"{os.sep}orbax{os.sep}" in trace.tb_frame.f_code.co_filename:
            return False
        trace = trace.tb_next
    return True


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(_is_news)
