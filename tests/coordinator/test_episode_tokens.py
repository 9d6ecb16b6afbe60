"""The trainer gets the tokens that were sampled and observed, in order, for thousands of episodes of every policy."""

from __future__ import annotations

import collections
import os

import pytest
from episode_histories import EpisodeHistory
from episode_records import TURNS
from turns import TURN, third_of

from fluxjax.config.learning import AdaptiveAsyncConfig
from fluxjax.coordinator import Synchronous
from fluxjax.coordinator.policies.adaptive_async import AdaptiveAsync
from fluxjax.coordinator.policies.april import April
from fluxjax.coordinator.policies.tail_batching import TailBatching

EPISODES = 1_000 if "MUTANTS_ROOT" in os.environ else 10_000  # a mutant is noticed in the first hundred
POLICIES = {
    "synchronous": lambda: Synchronous(),
    "tail batching": lambda: TailBatching(1.5, 1.5, 1),
    "april": lambda: April(oversample=2.0),
    "adaptive async": lambda: AdaptiveAsync(AdaptiveAsyncConfig(ratio=0.9, max_staleness=3)),
}


@pytest.mark.slow
@pytest.mark.turn(0, 1, 2)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_trained_on_is_what_was_said(policy: str) -> None:
    """Tokens, versions, log-probs, media, rewards and inputs are those of the records, each once and in order."""
    counts: collections.Counter[str] = collections.Counter()
    lengths: set[int] = set()
    seed = 100_000 * list(POLICIES).index(policy) + 10_000 * (TURN or 0)
    while counts["episodes"] < third_of(EPISODES) / len(POLICIES):
        history = EpisodeHistory(seed, POLICIES[policy])
        history.go()
        counts += history.records.counts
        lengths |= history.records.lengths
        seed += 1
    assert {1, 2} <= lengths and max(lengths) <= TURNS
    assert max(lengths) > 3 * TURNS / 4 or counts["episodes"] < 500
    assert min(counts["media"], counts["turns"]) > counts["episodes"]
    assert min(counts["moved"], counts["forgotten"], counts["repeated"]) > counts["episodes"] / 50
    if policy in ("april", "adaptive async"):
        assert counts["mixed"] + counts["resumed"] > counts["episodes"] / 50, "no episode went on under new weights"
        assert counts["carried"] > counts["episodes"] / 100, "no episode went on behind a checkpoint"
        assert counts["restored"] > counts["episodes"] / 50 or policy != "april"
    assert min(counts["killed"], counts["named"]) > counts["episodes"] / 200
