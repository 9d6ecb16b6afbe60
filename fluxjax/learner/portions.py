"""A step's gradients in portions: computed at different times, on different devices, and as if all at once in the end.

The loss weights of a portion are normalised over the portion, so its gradient is that of a mean over it. In the step's
mean a portion counts as much as its share of the step's normaliser: tokens, or responses (Flexes, section 4.4,
"Preserving On-Policy Semantics"). Nothing is updated in between, so that all portions are of the same weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding.strategy import Params, Tally

from ..algorithms.loss import normaliser
from ..base.types import Group, PreparedPrompt
from ..batch.fill import Composition
from ..config import Config
from .learner import Learner

Outcome = tuple[Params, Tally]


@dataclasses.dataclass
class Portion:
    """Some groups of a step with their advantages, and their gradients where they have been computed."""

    groups: Sequence[Group]
    prepared: Mapping[int, PreparedPrompt]
    size: int  # of the step's normaliser
    learner: Learner | None = None  # whose mesh the gradients are on
    composition: Composition | None = None  # the last one that was computed
    outcome: Outcome | None = None


def portion(groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt], config: Config) -> Portion:
    """One without gradients yet."""
    lengths = np.array([len(sample.response.token_ids) for group in groups for sample in group.samples], np.int64)
    size = normaliser(lengths, config.algorithm.loss_aggregation, config.rollout.max_new_tokens)
    return Portion(groups, prepared, size)


def has_gradient(groups: Iterable[Group], skip_idle: bool) -> bool:
    """Whether there is a token to train on; with `skip_idle`, one with an advantage."""
    samples = (sample for group in groups for sample in group.samples if sample.response.token_ids)
    return any(not skip_idle or sample.advantage != 0.0 for sample in samples)


def joined(learner: Learner, portions: Sequence[Portion]) -> Portion:
    """One portion of all of their groups. Its gradients, if any of them has some, are on `learner`'s mesh; theirs are
    donated. Those without gradients count for the normaliser only."""
    size = sum(one.size for one in portions)
    computed = [one for one in portions if one.outcome is not None]
    total: Outcome | None = None
    for one in computed:
        assert one.outcome is not None
        grads, tally = one.outcome if one.size == size else _scaled(one.outcome, np.float32(one.size / size))
        brought = learner.bring(grads, tally)
        total = brought if total is None else learner.add(total, brought)
    groups = sorted((group for one in portions for group in one.groups), key=lambda group: group.prompt.draw)
    prepared = {draw: prompt for one in portions for draw, prompt in one.prepared.items()}
    return Portion(groups, prepared, size, learner, computed[-1].composition if computed else None, total)


@functools.partial(jax.jit, donate_argnums=0)
def _scaled(outcome: Outcome, share: Any) -> Outcome:
    """What is weighted by the loss weights; counts and sums over tokens stay."""
    grads, tally = outcome
    sums = tally.sums | {"loss": tally.sums["loss"] * share}
    return jax.tree.map(lambda grad: grad * jnp.asarray(share, grad.dtype), grads), Tally(sums, tally.maxima)
