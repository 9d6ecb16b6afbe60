"""Several optimizer steps a training step: what each is made of. `test_layout_steps` has them on several devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_cases import compose
from step_cases import ALGORITHM_CASES, TOKEN, VERSION, flat, learner_of, near_policy, trained
from test_algorithms import group, random_case

from fluxjax.algorithms import grpo, loss
from fluxjax.config import AlgorithmConfig, ImportanceConfig, cli
from fluxjax.config.cli import remarks
from fluxjax.learner.learner import of_all_updates
from fluxjax.learner.loss_inputs import with_logprobs
from fluxjax.learner.policy_trainer import minibatches

PPO = ImportanceConfig()


# --- dual clip ----------------------------------------------------------------------------------


def test_dual_clip_is_the_maximum_of_its_equation_and_changes_no_bit_within_its_bound():
    logprobs, entropies, batch = random_case(0)
    logprobs = jnp.asarray(logprobs)
    batch = jax.tree.map(jnp.asarray, dataclasses.replace(batch, advantages_BT=batch.advantages_BT * 2))
    found = {c: grpo.token_loss(logprobs, entropies, batch, AlgorithmConfig(dual_clip=c)) for c in (0.0, 1.5, 3.0)}
    loss = {c: loss_BT for c, (loss_BT, _) in found.items()}
    np.testing.assert_array_equal(loss[3.0], loss[0.0])  # ratios are up to 2.5
    bound = np.where(batch.advantages_BT < 0, 1.5 * batch.advantages_BT, -np.inf)
    expected = np.where(batch.loss_weights_BT != 0, -np.maximum(-loss[0.0], bound), 0)
    np.testing.assert_allclose(loss[1.5], expected, rtol=1e-6)
    assert (loss[1.5] != loss[0.0]).any()
    np.testing.assert_array_equal(found[1.5][1]["dual_clip_fraction"], loss[1.5] != loss[0.0])


# --- what an optimizer step is made of -------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 5), st.randoms())
def test_every_group_with_a_token_is_in_one_minibatch(sizes, count, random):
    groups = [group([0.0] * size, draw) for draw, size in enumerate(sizes)]
    shuffled = random.sample(groups, len(groups))
    parts = minibatches(shuffled, count)
    assert parts == minibatches(groups, count), "whatever order they arrive in"
    draws = sorted(one.prompt.draw for part in parts for one in part if one.samples)
    assert draws == [draw for draw, size in enumerate(sizes) if size]
    assert all(any(one.samples for one in part) for part in parts) and len(parts) <= count
    assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1


def test_metrics_of_several_updates():
    first = {"loss": 1.0, "lr": 0.1, "trained_tokens": 10.0, "skipped_nonfinite": 0.0, "gap_max": 3.0, "rare": 7.0}
    second = {"loss": 3.0, "lr": 0.2, "trained_tokens": 30.0, "skipped_nonfinite": 1.0, "gap_max": 2.0}
    assert of_all_updates([first]) == first
    merged = {"loss": 2.5, "lr": 0.2, "trained_tokens": 40.0, "skipped_nonfinite": 1.0, "gap_max": 3.0, "rare": 7.0}
    assert of_all_updates([first, second]) == merged | {"updates": 2.0}


def test_the_proximal_policy_is_the_stored_one():
    logprobs, _, batch = random_case(1)
    logprobs = jnp.asarray(logprobs)
    batch = jax.tree.map(jnp.asarray, batch)
    moved = dataclasses.replace(batch, proximal_logprobs_BT=logprobs - 0.25)
    trained = batch.loss_weights_BT != 0
    log_ratio, _ = loss.correction(logprobs, batch, TOKEN)
    assert not np.asarray(log_ratio).any()
    log_ratio, weight = loss.correction(logprobs, moved, TOKEN)
    np.testing.assert_allclose(log_ratio, np.where(trained, 0.25, 0.0), atol=1e-6)
    ratio = np.exp(logprobs - 0.25 - batch.behaviour_logprobs_BT)
    np.testing.assert_allclose(weight, np.where(trained, np.minimum(ratio, 1.3), 0.0), rtol=1e-5)
    log_ratio, weight = loss.correction(logprobs, moved, PPO)
    np.testing.assert_allclose(log_ratio, np.where(trained, logprobs - batch.behaviour_logprobs_BT, 0), atol=1e-6)
    np.testing.assert_allclose(weight, trained, rtol=1e-6)


# --- whole steps ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("case", "decoupled"), [("grpo twice", False), ("token weights twice", True)])
def test_a_step_equals_its_optimizer_steps_by_hand(case, decoupled):
    """Two epochs of two minibatches, each laid out for itself, around the log-probs of the first weights."""
    step, got, _ = trained(case)
    metrics, want = step.metrics, learner_of(ALGORITHM_CASES[case], falling=20)
    config = want.config
    groups, prepared, _ = near_policy()
    groups = grpo.advantages(groups, config.algorithm)
    draws = sorted(one.prompt.draw for one in groups)
    parts = [[one for one in groups if one.prompt.draw in draws[first::2]] for first in (0, 1)]
    compositions = [compose(part, prepared, config, version=VERSION) for part in parts]
    logprobs = [[want.logprobs(batch.inputs)[0] for batch in c.batches] for c in compositions]
    scored = [with_logprobs(c, "proximal_logprobs_BT", own) for c, own in zip(compositions, logprobs, strict=True)]
    steps = [want.step(composition.everywhere) for _ in range(2) for composition in scored]
    np.testing.assert_allclose(flat(got), flat(want), rtol=0, atol=0.0 if not decoupled else 1e-7)
    assert (got.version, want.version) == (VERSION + 1, VERSION + 4)
    assert metrics["updates"] == 4.0 and metrics["lr"] == steps[-1]["lr"]
    assert metrics["lr"] == pytest.approx(float(config.optim.lr) * (1 - 3 / 80))  # the schedule counts optimizer steps
    assert metrics["trained_tokens"] == sum(step["trained_tokens"] for step in steps)
    assert metrics["packing/microbatches"] == 2.0
    if decoupled:
        assert steps[0]["ratio"] == pytest.approx(1.0, abs=1e-6) and abs(steps[2]["ratio"] - 1.0) > 1e-4
    assert steps[2]["staleness/kl"] == pytest.approx(steps[0]["staleness/kl"], rel=1e-5), "of the proximal policy"


# --- settings ---------------------------------------------------------------------------------------


def test_decoupled_is_warned_of_with_one_optimizer_step_only():
    flags = ["--config.policy=april", "--config.algorithm.importance.decoupled=true"]
    assert any("decoupled clips around" in line for line in remarks(cli.load(flags)))
    for field in ("minibatches", "epochs"):
        config = cli.load([*flags, f"--config.algorithm.{field}=2", "--config.algorithm.clip_high=0.3"])
        assert not any("decoupled clips" in line or "clip_high" in line for line in remarks(config))
