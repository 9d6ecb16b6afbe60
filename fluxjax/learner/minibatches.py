"""The optimizer steps of one training step: its groups in minibatches, several times over (PPO, arXiv:1707.06347,
algorithm 1)."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..base.types import Group

_SUMMED = ("trained_tokens", "skipped_nonfinite", "seconds/idle")


def minibatches(groups: Sequence[Group], count: int) -> list[list[Group]]:
    """Deals whole groups, in the order of their draws, to `count` minibatches in turn, so that each is a mixture of the
    step. Those without a token are left out: they have nothing to learn from."""
    ordered = sorted(groups, key=lambda group: group.prompt.draw)
    dealt = [ordered[first::count] for first in range(count)]
    return [part for part in dealt if any(s.response.num_tokens for group in part for s in group.samples)]


def of_all_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a training step out of those of its optimizer steps: sums of tokens, seconds and skipped steps;
    the last learning rate; the largest of maxima; of all other metrics the mean, weighted by trained tokens, over the
    optimizer steps that have it. `updates` is the number of optimizer steps. The metrics of a single optimizer step
    stay unchanged."""
    if len(updates) == 1:
        return dict(updates[0])
    merged = {"updates": float(len(updates))}
    for name in dict.fromkeys(name for update in updates for name in update):
        having = [update for update in updates if name in update]
        values = [update[name] for update in having]
        if name == "lr":
            merged[name] = values[-1]
        elif name in _SUMMED:
            merged[name] = float(np.sum(values))
        elif name.endswith("_max"):
            merged[name] = max(values)
        else:
            merged[name] = float(np.average(values, weights=[update["trained_tokens"] for update in having]))
    return merged
