"""Fault histories keep what their policies promise; in this process, so that a mutant is found at its first failure."""

import pytest
from histories import History, check, scenario

from fluxjax.config import POLICIES
from fluxjax.coordinator.messages import Skip


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_promises_are_kept_whatever_goes_wrong(first: int) -> None:
    for seed in range(first, first + 20):
        assert check(seed).wrong == "", f"seed {seed}"


@pytest.mark.slow
def test_histories_have_everything_in_them() -> None:
    made = [scenario(seed) for seed in range(200)]
    assert max(config.rollout.prompts_per_step for config in made) == 16
    assert any(config.simulation.prompts == 1 for config in made), "a source of one prompt"
    early = [config for config in made if config.speculative_sync]
    assert {config.policy.name for config in early} == POLICIES.keys() - {"adaptive_async"}
    assert any(config.rollout.tempered for config in made)
    for name in ("target_staleness", "prompts", "responses"):
        assert any(isinstance(getattr(config.policy, name, None), str) for config in made)
    assert any({"stratify", "lengths"} <= set(getattr(config.policy, "prefer", ())) for config in made)


def test_a_broken_promise_is_a_finding() -> None:
    history = History(scenario(0))
    assert history.run() == ""
    group = history.groups[0]
    history = History(scenario(0))
    inner = history.cluster.watch
    assert inner is not None
    told = False

    def watch(now: float, what) -> None:
        nonlocal told
        inner(now, what)
        if not told and group.prompt.draw in history.promises.books.prompts:
            told = True
            history.promises.said(Skip(group.prompt, "too much to do"))

    history.cluster.watch = watch
    assert "is skipped: too much to do" in history.run()
