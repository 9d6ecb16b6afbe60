"""Damages checkpoints at random. A restore must give the same bits as before, or the newest of those that
nobody touched and a line that names the damaged file."""

import contextlib
import logging
import pathlib
import random
import shutil
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from checkpoint_cases import save

from fluxjax.run.checkpoint import Checkpoints
from fuzz.draws import each
from sharding.weights import like

DRAWS = 10  # in CI
STEPS = (1, 2, 3)


def run(count: int, seed: int) -> list[str]:
    """Makes one small folder, damages `count` copies of it, and returns what was restored wrongly; good is an empty
    list."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        written(folder / "run")
        return each(count, seed, lambda rng: attempt(folder, rng))


def arrays_of(step: int) -> dict[str, jax.Array]:
    """Returns the arrays of a step; noise, so that the files hold them as they are."""
    return {"w": jax.random.normal(jax.random.key(step), (40, 25)), "step": jnp.int32(step)}


def written(folder: pathlib.Path) -> None:
    """Writes a checkpoint of each step, the newest two of which are kept."""
    checkpoints = Checkpoints(folder, keep=2)
    for step in STEPS:
        assert save(checkpoints, step, arrays_of(step), {"step": step})
    checkpoints.close()


def attempt(folder: pathlib.Path, rng: random.Random) -> None:
    """Damages one file or folder of a copy and restores from it. Raises AssertionError if that goes wrong."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "run", copy)
    paths = sorted(copy.rglob("*"))
    arrays = largest_file(copy / str(STEPS[-1]))
    victim = arrays if rng.random() < 0.3 else rng.choice(paths)
    how = rng.choice([deleted] if victim.is_dir() else [flipped, truncated, extended, emptied, deleted, overwritten])
    how(victim, rng)
    place = victim.relative_to(copy)
    damaged = int(place.parts[0])
    what = f"{how.__name__} {place}"
    newest, older = STEPS[-1], STEPS[-2]
    with heard() as lines:
        try:
            step, arrays, state = restored(copy)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    same = jax.tree.map(np.array_equal, arrays, arrays_of(step))
    right = state == {"step": step} and all(jax.tree.leaves(same))
    assert right, f"{what}: other bits than were written at step {step}"
    if step == newest:
        return
    assert step == older and damaged == newest, f"{what}: step {step} was restored"
    gone = len(place.parts) == 1 and how is deleted  # nothing says that it ever was
    assert gone or any(str(newest) in line for line in lines), f"{what}: no line says why"


def restored(folder: pathlib.Path) -> tuple[int, dict[str, jax.Array], dict[str, int]]:
    checkpoints = Checkpoints(folder, keep=2)
    with contextlib.closing(checkpoints):
        step, arrays, state = checkpoints.restore(like(arrays_of(0)))
        checkpoints.forget_after(step)
        assert save(checkpoints, STEPS[-1] + 1, arrays, {}) and checkpoints.wait(), "what follows can't be saved"
        return step, arrays, state


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    """Returns the file that holds the arrays of a checkpoint, or most of them."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flipped(file: pathlib.Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncated(file: pathlib.Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


def extended(file: pathlib.Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def emptied(file: pathlib.Path, rng: random.Random) -> None:
    file.write_bytes(b"")


def overwritten(file: pathlib.Path, rng: random.Random) -> None:
    """A bad sector: a run of zeros."""
    data = bytearray(file.read_bytes())
    begin = rng.randrange(len(data))
    end = min(len(data), begin + 512)
    data[begin:end] = bytes(end - begin)
    file.write_bytes(data)


def deleted(path: pathlib.Path, rng: random.Random) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collects the warnings of fluxjax, which are shown nowhere."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("fluxjax")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
