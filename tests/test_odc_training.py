"""Training under ODC: what the composer deals out and devices compute alone equals what one device computes."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import alone, assert_equal, learner, outcome, random_groups, tiny
from packing_cases import MODEL, compose, make_config, make_groups, owners

import models
from fluxjax.algorithms import grpo
from fluxjax.config import Balance, ConfigError, Strategy
from fluxjax.learner.learner import Learner
from models.config import Qwen2Config
from sharding.mesh import make_mesh
from sharding.spread.shapes import ShapeBook

HEADS = (4, 2)


def odc_config(share=True, balance=Balance.LB_MINI, **sharding):
    config = make_config(tokens_per_row=64, rows=4, patches=128, share=share)
    config.sharding.strategy, config.sharding.balance = Strategy.ODC, balance
    for name, value in sharding.items():
        setattr(config.sharding, name, value)
    return config


def composed(config, seed, devices):
    groups, prepared = random_groups(seed)
    text = tiny(HEADS).config.text
    return compose(groups, prepared, config, devices, vision=MODEL.vision, text=text, shapes=SHAPES)


SHAPES = ShapeBook(2)  # few: every one is compiled on every device


@pytest.mark.long
@pytest.mark.parametrize(("devices", "balance"), [(2, Balance.LB_MINI), (3, Balance.LB_MICRO)])
@given(seed=st.integers(0, 2**20), share=st.booleans())
@settings(deadline=None, max_examples=2)
def test_any_batch_equals_one_device(devices, balance, seed, share):
    """Images, videos and text, in microbatches of very different sizes."""
    composition = composed(odc_config(share, balance), seed, devices)
    assert_equal(outcome(learner(HEADS, devices), composition), alone(HEADS, *random_groups(seed)))


@pytest.mark.long
@pytest.mark.slow
def test_sequences_longer_than_a_device_are_computed_by_several():
    """A device holds 32 tokens; the longest sequence takes two of four, and a short one fills a third meanwhile. Then
    each of four goes its own way. In the deterministic mode all of it ends in the same bits."""
    config = odc_config(deterministic=True, max_degree=2)
    config.packing.tokens_per_row = config.rollout.max_sequence_tokens = 16
    config.packing.rows_per_device, config.packing.patches_per_device = 2, 64
    composition = composed(config, 58, 4)
    assert owners(composition) == (None, 0, 1, 2, 3)
    assert composition.microbatches[0].layout.plan.degrees == (2, 1)
    one = Learner(config, tiny(HEADS), grpo.token_loss, mesh=make_mesh(4))
    first = outcome(one, composition)
    assert_equal(first, alone(HEADS, *random_groups(58)))
    again, tally = one.accumulate(composition.microbatches)
    assert_close((again, tally), (first[1], first[0]), 0)
    assert (
        one.step(composition.microbatches[:1])["seconds/idle"] == 0 and one.version == 1
    )  # no device has anything of its own


@pytest.mark.long
def test_strategies_may_change_between_steps():
    """ODC, with and without hybrid sharding, leaves parameters and optimizer state where FSDP has them."""
    order = [(Strategy.ODC, False), (Strategy.FSDP, False), (Strategy.ODC, True)]
    ends = []
    for steps in ([(Strategy.FSDP, False)] * len(order), order):
        config = odc_config(deterministic=True, devices_per_host=1)
        config.optim.eps = 1e-2  # Adam divides by tiny second moments, which would turn rounding into whole steps
        one = Learner(config, tiny(HEADS), grpo.token_loss, mesh=make_mesh(2))
        metrics = []
        for seed, (strategy, hybrid) in enumerate(steps):
            config.sharding.strategy, config.sharding.hybrid = strategy, hybrid
            vars(one.gradients).pop("odc", None)  # as a new process would begin
            composition = composed(config, seed, 2)
            found = one.step(composition.microbatches)
            assert (strategy is Strategy.ODC) == ("seconds/idle" in found)
            metrics.append({name: value for name, value in found.items() if name != "seconds/idle"})
        ends.append((one.params, metrics))
    (want, want_metrics), (got, got_metrics) = ends
    for mine, theirs in zip(got_metrics, want_metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert_close(got, want, 1e-5)


@pytest.mark.long
def test_fifty_steps_coincide_with_fsdp():
    """A text model learns from responses of 1 to 40 tokens. Two runs of ODC in a fixed order end in equal bits."""
    model = models.create(Qwen2Config(text=tiny(HEADS).config.text), seed=3)
    curves, ends = [], []
    for strategy in (Strategy.FSDP, Strategy.ODC, Strategy.ODC):
        config = odc_config(deterministic=True)
        config.sharding.strategy = strategy
        config.optim.lr, config.optim.eps = 3e-3, 1e-4
        config.optim.warmup_steps = 0
        one = Learner(config, model, grpo.token_loss, mesh=make_mesh(2))
        losses = []
        for step in range(50):
            rng = np.random.default_rng(step % 5)
            lengths = np.minimum(rng.lognormal(2.0, 1.0, 6).astype(int) + 1, 40).tolist()
            groups, prepared = make_groups([[3]] * 6, [[n] for n in lengths], seed=step % 5)
            composition = compose(groups, prepared, config, 2, text=model.config.text, shapes=SHAPES)
            losses.append(one.step(composition.microbatches)["loss"])
        curves.append(np.array(losses))
        ends.append(one.params)
    fsdp, odc, again = curves
    assert np.abs(fsdp[-5:] - fsdp[:5]).max() > 0.3  # it learned something, so that the curves could have parted
    np.testing.assert_allclose(odc, fsdp, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(again, odc)
    assert_close(ends[1], ends[2], 0)


def assert_close(got, want, tolerance):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


def test_hosts_that_the_mesh_can_not_be_cut_into_are_refused():
    with pytest.raises(ConfigError, match=r"sharding\.devices_per_host is 8: no group of 8 devices"):
        Learner(odc_config(hybrid=True), tiny(HEADS), grpo.token_loss, mesh=make_mesh(4))
