"""Sequences spread over 8 devices, by any plan: loss, gradients and log-probs of one device to 1e-5 (float32)."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import alone, assert_equal, learner, outcome, random_groups, tiny
from packing_cases import MODEL, compose, make_config, make_groups

from fluxjax.algorithms import grpo
from fluxjax.batch import spreading
from fluxjax.batch.composer import Composer
from fluxjax.config import ConfigError, Strategy, cli
from fluxjax.learner.learner import Learner
from sharding.cost import CostModel
from sharding.mesh import make_mesh
from sharding.planner.plan import ShardPlan, rounds

DEVICES = 8
HEADS = [(28, 4), (40, 8), (4, 1)]  # as in Qwen2.5-VL 7B and 32B; and fewer than devices
both_ways = pytest.mark.parametrize(
    "share", [pytest.param(True, id="shared"), pytest.param(False, id="plain", marks=pytest.mark.long)]
)


@pytest.fixture(autouse=True)
def _few_programs():
    """Nearly every plan here is a program of its own: see `_forget_compiled_programs`."""
    yield
    jax.clear_caches()


def random_plan(seed: int, max_degree: int, devices: int = DEVICES):
    """Any degrees on any groups, in up to three rounds a degree: far worse plans than a planner makes."""
    rng = np.random.default_rng(seed)

    def plan(lengths, work, most) -> ShardPlan:
        degrees = [1 << int(rng.integers(0, max_degree.bit_length())) for _ in lengths]
        firsts = [int(rng.integers(0, devices // degree)) * degree for degree in degrees]
        packed = rounds(devices, lengths, degrees, firsts, short=24, cap=40, most=int(rng.integers(1, 4)))
        return ShardPlan(devices, tuple(lengths), tuple(map(float, work)), tuple(degrees), tuple(firsts), packed)

    return plan


def spread_config(strategy=Strategy.FLEX_ULYSSES, share=True, max_degree=0):
    config = make_config(tokens_per_row=64, rows=4, patches=128, share=share)
    config.sharding.strategy = strategy
    config.sharding.max_degree = max_degree
    return config


@pytest.mark.long
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}-{heads[1]}")
@given(seed=st.integers(0, 2**20), share=st.booleans())
@settings(deadline=None, max_examples=1)
def test_any_plan_equals_one_device(heads, seed, share):
    groups, prepared = random_groups(seed)
    config = spread_config(share=share)
    with pytest.MonkeyPatch.context() as patch:
        degree = min(heads[0], DEVICES)
        patch.setattr(spreading, "planner", lambda *_: (degree, random_plan(seed, degree)))
        composition = compose(groups, prepared, config, DEVICES, vision=MODEL.vision, text=tiny(heads).config.text)
    assert_equal(outcome(learner(heads, DEVICES), composition), alone(heads, groups, prepared))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "degree", "share"),
    [
        ("flex_ulysses", 0, True),
        ("ulysses", 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("flex_ulysses", 0, False),
                ("ulysses", 1, False),
                ("ulysses", 4, True),
                ("ulysses", 8, False),
            ]
        ),
    ],
)
def test_every_strategy_equals_one_device(strategy, degree, share):
    heads = (8, 2)
    groups, prepared = random_groups(7)
    config = spread_config(Strategy(strategy), share, degree)
    composition = compose(groups, prepared, config, DEVICES, vision=MODEL.vision, text=tiny(heads).config.text)
    if strategy == "ulysses":
        assert {one for batch in composition.batches for one, _ in batch.inputs.spread.rounds} == {degree}
    assert_equal(outcome(learner(heads, DEVICES), composition), alone(heads, groups, prepared))


@pytest.mark.long
@both_ways
def test_replicas_are_never_spanned(share):
    """Six devices are three replicas of two: degrees stay at two, features and exports within their replica, even if
    responses to one image are in several."""
    groups, prepared = random_groups(3)
    config = spread_config(share=share)
    composition = compose(groups, prepared, config, 6, vision=MODEL.vision, text=tiny((8, 2)).config.text)
    assert {degree for batch in composition.batches for degree, _ in batch.inputs.spread.rounds} <= {1, 2}
    assert_equal(outcome(learner((8, 2), 6), composition), alone((8, 2), groups, prepared))


@pytest.mark.long
def test_one_short_text_on_all_devices():
    """Seven devices have no token and none has a patch; all take part in the collectives, vision tower's included."""
    groups, prepared = make_groups([[5]], [[4]])
    composition = compose(
        groups, prepared, spread_config(), DEVICES, vision=MODEL.vision, text=tiny((8, 2)).config.text
    )
    [batch] = composition.batches
    assert not batch.inputs.vision.frame_segments_P.any()
    assert_equal(outcome(learner((8, 2), DEVICES), composition), alone((8, 2), groups, prepared))


def test_a_calibration_decides_what_is_spread(tmp_path):
    """On links that take for ever nothing is; the file that a run names is read once, a missing one is named."""
    groups, prepared = make_groups([[60], [30], [9], [4]], [[4], [3], [2], [1]])
    config = spread_config()
    config.sharding.alpha = 8.0  # memory forces nothing
    free = compose(groups, prepared, config, 4, text=tiny((8, 2)).config.text)
    cost = CostModel.published()
    within = dataclasses.replace(cost.within, per_byte=1e9 * cost.within.per_byte)
    dataclasses.replace(cost, within=within).save(tmp_path / "slow.json")
    config.sharding.calibration = str(tmp_path / "slow.json")
    dear = compose(groups, prepared, config, 4, text=tiny((8, 2)).config.text)
    degrees = [max(one.layout.plan.degrees) for step in (free, dear) for one in step.microbatches]
    assert degrees[0] > 1 and degrees[1] == 1
    config.sharding.calibration = str(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"sharding\.calibration.*none\.json"):
        compose(groups, prepared, config, 4, text=tiny((8, 2)).config.text)


@pytest.mark.long
def test_strategies_may_change_between_steps():
    """Parameters and optimizer state have one layout: a run that changes its strategy at every step ends as FSDP."""
    heads, order = (8, 2), [Strategy.FSDP, Strategy.FLEX_ULYSSES, Strategy.ULYSSES, Strategy.FSDP]
    config = spread_config()
    config.optim.eps = 1e-2  # Adam divides by tiny second moments, which would turn rounding into whole steps
    ends = []
    for strategies in ([Strategy.FSDP] * len(order), order):
        one = Learner(config, tiny(heads), grpo.token_loss, mesh=make_mesh(DEVICES))
        metrics = []
        for seed, strategy in enumerate(strategies):
            config.sharding.strategy = strategy
            groups, prepared = random_groups(seed)
            composition = compose(groups, prepared, config, DEVICES, vision=MODEL.vision, text=tiny(heads).config.text)
            metrics.append(one.step(composition.microbatches))
        ends.append((one.params, metrics))
    (want, want_metrics), (got, got_metrics) = ends
    for mine, theirs in zip(got_metrics, want_metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("degree", "devices", "heads", "says"),
    [
        (16, 8, 28, "above 8, the largest power of two"),  # more than there are devices
        (8, 8, 4, "above the 4 query heads"),
        (4, 6, 28, "above 2, the largest power of two"),  # groups never leave a replica: 6 = 3 x 2
    ],
)
def test_a_degree_that_can_not_be_is_refused_before_anything_runs(degree, devices, heads, says):
    with pytest.raises(ConfigError, match=says) as caught:
        Composer(spread_config(max_degree=degree), devices, text=dataclasses.replace(MODEL.text, num_heads=heads))
    assert "sharding.max_degree" in str(caught.value)


def test_a_sequence_longer_than_all_devices_is_refused():
    groups, prepared = make_groups([[1100]], [[3]])
    config = make_config(tokens_per_row=32, rows=4)
    config.sharding.strategy = Strategy.FLEX_ULYSSES
    with pytest.raises(ConfigError, match=r"sequence 0 has 1103 tokens, but 8 devices hold 1024"):
        compose(groups, prepared, config, DEVICES, text=tiny((8, 2)).config.text)


def test_media_that_no_device_can_hold_are_refused():
    groups, prepared = make_groups([[1, (1, 16, 16)]], [[3]])
    with pytest.raises(ConfigError, match="patches_per_device = 128"):
        compose(groups, prepared, spread_config(), DEVICES, vision=MODEL.vision, text=tiny((8, 2)).config.text)


def test_more_than_one_microbatch_when_memory_asks_for_it():
    groups, prepared = make_groups([[60]] * 40, [[4]] * 40)
    config = make_config(tokens_per_row=64, rows=2)
    config.sharding.strategy = Strategy.FLEX_ULYSSES
    composition = compose(groups, prepared, config, DEVICES, text=tiny((8, 2)).config.text)
    assert len(composition.batches) > 1 and len(composition.keys) == 40
    assert all(batch.inputs.tokens_BT.shape[1] <= 128 for batch in composition.batches)
    trained = sum(int((batch.loss_weights_BT != 0).sum()) for batch in composition.batches)
    assert trained == 160


def test_rollouts_may_be_longer_than_a_row_but_not_than_all_devices_of_a_sequence():
    longer = [
        "--config=configs/text.py",
        "--config.packing.tokens_per_row=64",
        "--config.rollout.max_sequence_tokens=99",
    ]
    cli.load([*longer, "--config.sharding.strategy=flex_ulysses"])
    with pytest.raises(ConfigError, match="tokens_per_row"):
        cli.load(longer)
    config, text = spread_config(), tiny((8, 2)).config.text  # 256 tokens a device
    config.rollout.max_sequence_tokens = 2048
    Composer(config, DEVICES, text=text).check()
    config.rollout.max_sequence_tokens = 2049
    with pytest.raises(ConfigError, match=r"max_sequence_tokens is 2049.*hold 2048"):
        Composer(config, DEVICES, text=text).check()


def test_a_mesh_with_further_replicas_is_refused():
    groups, prepared = make_groups([[20], [5]], [[4], [3]])
    text = tiny((8, 2)).config.text
    [batch] = compose(groups, prepared, spread_config(), 4, vision=MODEL.vision, text=text).batches
    one = Learner(make_config(), tiny((8, 2)), grpo.token_loss, mesh=make_mesh(4, replicas=2))
    with pytest.raises(ValueError, match="make_mesh"):
        one.logprobs(batch.inputs)
