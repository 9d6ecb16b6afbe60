"""Checkpoints written as a trainer that is alone writes them."""

from typing import Any

from jaxtyping import PyTree

from fluxjax.run.checkpoint import Checkpoints


def save(checkpoints: Checkpoints, step: int, arrays: PyTree, state: dict[str, Any]) -> bool:
    """Starts writing, unless there is a checkpoint of this step. Returns whether all went well so far."""
    failed = len(checkpoints.failed)
    if checkpoints.may_save(step, arrays):
        checkpoints.write(step, arrays, state)
    return len(checkpoints.failed) == failed
