"""A step's gradients in portions: computed at different times, on different devices, and as if all at once in the end.

The loss weights of a portion are normalised over the portion, so its gradient is that of a mean over it. In the step's
mean a portion counts as much as its share of the step's normaliser: tokens, or responses (Flexes, section 4.4,
"Preserving On-Policy Semantics"). Nothing is updated in between, so that all portions are of the same weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sharding.strategy import Tally

from ..algorithms.loss import normaliser
from ..base.types import Group, PreparedPrompt
from ..batch.composition import Composition
from ..config import Config
from .gradients import Gradients, Outcome


@dataclasses.dataclass
class Portion:
    """Some groups of a step with their advantages, and their gradients where they have been computed."""

    groups: Sequence[Group]
    prepared: Mapping[int, PreparedPrompt]
    size: int  # of the step's normaliser
    gradients: Gradients | None = None  # whose mesh the outcome is on
    composition: Composition | None = None  # the last one that was computed
    outcome: Outcome | None = None


def portion(groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt], config: Config) -> Portion:
    """A portion without gradients yet."""
    lengths = np.array([len(sample.response.token_ids) for group in groups for sample in group.samples], np.int64)
    size = normaliser(lengths, config.algorithm.loss_aggregation, config.rollout.max_new_tokens)
    return Portion(groups, prepared, size)


def has_gradient(groups: Iterable[Group], skip_idle: bool) -> bool:
    """Whether there is a token to train on; with `skip_idle`, one with an advantage."""
    samples = (sample for group in groups for sample in group.samples if sample.response.token_ids)
    return any(not skip_idle or sample.advantage != 0.0 for sample in samples)


def joined(gradients: Gradients, portions: Sequence[Portion]) -> Portion:
    """One portion of all of their groups. Its outcome, if any of them has one, is on the mesh of `gradients`; theirs
    are donated. Those without an outcome count for the normaliser only."""
    size = sum(portion.size for portion in portions)
    composition: Composition | None = None
    total: Outcome | None = None
    for portion in portions:
        if portion.outcome is not None:
            share = np.float32(portion.size / size)
            brought = gradients.bring(portion.outcome if portion.size == size else _scaled(portion.outcome, share))
            total = brought if total is None else gradients.add(total, brought)
            composition = portion.composition
    groups = sorted((group for portion in portions for group in portion.groups), key=lambda group: group.prompt.draw)
    prepared = {draw: prompt for portion in portions for draw, prompt in portion.prepared.items()}
    return Portion(groups, prepared, size, gradients, composition, total)


@functools.partial(jax.jit, donate_argnums=0)
def _scaled(outcome: Outcome, share: jax.Array | np.float32) -> Outcome:
    """What is weighted by the loss weights; counts and sums over tokens stay."""
    grads, tally = outcome
    sums = tally.sums | {"loss": tally.sums["loss"] * share}
    return jax.tree.map(lambda grad: grad * jnp.asarray(share, grad.dtype), grads), Tally(sums, tally.maxima)
