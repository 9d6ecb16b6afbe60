"""Sequences spread over devices by any plan, and microbatches that devices compute alone (ODC): loss, gradients and
log-probs of one device to 1e-5 (float32), and steps that end where those of FSDP end."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from learner_cases import alone, alone_of, assert_equal, learner, outcome, random_groups, tiny
from packing_cases import MODEL, QWEN3_5, QWEN3_VL, compose, make_config, make_groups, owners
from turns import by_turns

from benchmarks.cost_fit import published, save
from benchmarks.dynamic_packing import packed_rounds
from fluxjax.algorithms import grpo
from fluxjax.batch import spreading
from fluxjax.batch.composer import Composer
from fluxjax.config import FSDP, ODC, ConfigError, FlexUlysses, Strategy, Ulysses, cli
from fluxjax.learner.learner import Learner
from sharding.kernels.delta_heads import DeltaHeads
from sharding.mesh import make_mesh
from sharding.planner.plan import Limits, ShardPlan
from sharding.spread.shapes import ShapeBook

DEVICES, HEADS = 8, (8, 2)
ULYSSES, FLEX = Ulysses, FlexUlysses
HYBRID: dict[str, Any] = {"hybrid": True, "devices_per_host": 2}
# Three key heads are filled up over two devices, and copied over four; four key heads and more devices than KV heads.
ODD = dataclasses.replace(QWEN3_5, text=dataclasses.replace(QWEN3_5.text, delta=DeltaHeads(3, 6, 8, 12)))
SHAPES = ShapeBook(2)  # few: every one is compiled on every device


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
        packed = packed_rounds(devices, lengths, degrees, firsts, short=24, cap=40, most=int(rng.integers(1, 4)))
        return ShardPlan(devices, tuple(lengths), tuple(map(float, work)), tuple(degrees), tuple(firsts), packed)

    return plan


def spread_config(strategy: type[Strategy] = FLEX, share=True, **sharding):
    config = make_config(tokens_per_row=64, rows=4, patches=128, share=share)
    choose(config, strategy, **sharding)
    return config


def choose(config, strategy, **settings):
    """Sets the strategy, and those of the settings that it or its section has."""
    config.sharding.strategy = strategy()
    for name, value in settings.items():
        for section in (config.sharding.strategy, config.sharding):
            if hasattr(section, name):
                setattr(section, name, value)


def composed(config, seed, devices=DEVICES, heads=HEADS, shapes=None, model=MODEL):
    text = tiny(heads, model).config.text
    return compose(*random_groups(seed), config, devices, vision=MODEL.vision, text=text, shapes=shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices", "share", "degree", "model"),
    # Six devices are three replicas of two: degrees stay at two, features and exports within their replica, even if
    # responses to one image are in several.
    by_turns(
        [
            (FLEX, 8, True, 0, MODEL),
            (ULYSSES, 8, False, 2, MODEL),
            (FLEX, 6, False, 0, MODEL),
            (ULYSSES, 4, True, 2, QWEN3_VL),
            (FLEX, 8, True, 0, QWEN3_VL),
            (FLEX, 4, True, 0, QWEN3_5),
            (FLEX, 4, False, 0, ODD),
            (ULYSSES, 6, True, 2, ODD),
        ]
    ),
)
def test_every_strategy_equals_one_device(strategy, devices, share, degree, model):
    composition = composed(spread_config(strategy, share, max_degree=degree), 7, devices, model=model)
    degrees = {degree for batch in composition.batches for degree, _ in batch.inputs.spread.rounds}
    assert degrees == {2} if degree else degrees <= ({1, 2} if devices == 6 else {1, 2, 4, 8})
    assert_equal(outcome(learner(HEADS, devices, model), composition), alone_of(HEADS, 7, model))


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "seed", "share"),
    by_turns([((28, 4), 7, False), ((4, 1), 3, True)], first=1),  # as in Qwen2.5-VL 7B; and fewer than devices
)
def test_any_plan_equals_one_device(heads, seed, share, monkeypatch):
    degree = min(heads[0], DEVICES)
    monkeypatch.setattr(spreading, "planner", lambda *_: (degree, random_plan(seed, degree)))
    composition = composed(spread_config(share=share), seed, heads=heads)
    assert_equal(outcome(learner(heads, DEVICES), composition), alone_of(heads, seed))


@pytest.mark.long
@pytest.mark.parametrize("model", by_turns([MODEL, QWEN3_VL, QWEN3_5]))
def test_sequences_longer_than_a_device_are_computed_by_several(model):
    """A device holds 32 tokens; the longest sequence takes two of four, and a short one fills a third meanwhile. Then
    each of four goes its own way. In the deterministic mode all of it ends in the same bits."""
    config = spread_config(ODC, deterministic=True, max_degree=2)
    config.packing.tokens_per_row = config.rollout.max_sequence_tokens = 16
    config.packing.rows_per_device, config.packing.patches_per_device = 2, 64
    composition = composed(config, 58, 4, shapes=SHAPES, model=model)
    assert owners(composition) == (None, 0, 1, 2, 3)
    assert composition.microbatches[0].layout.plan.degrees == (2, 1)
    one = Learner(config, tiny(HEADS, model), grpo.token_loss, mesh=make_mesh(4))
    first = outcome(one, composition)
    assert_equal(first, alone_of(HEADS, 58, model))
    again, tally = one.accumulate(composition.microbatches)
    assert_close((again, tally), (first[1], first[0]), 0)
    step = one.step(composition.microbatches[:1])
    assert step["seconds/idle"] == 0 and one.version == 1  # no device has anything of its own


@pytest.mark.long
def test_one_short_text_on_all_devices():
    """Seven devices have no token and none has a patch; all take part in the collectives, vision tower's included."""
    groups, prepared = make_groups([[5]], [[4]])
    composition = compose(groups, prepared, spread_config(), DEVICES, vision=MODEL.vision, text=tiny(HEADS).config.text)
    [batch] = composition.batches
    assert not batch.inputs.vision.frame_segments_P.any()
    assert_equal(outcome(learner(HEADS, DEVICES), composition), alone(HEADS, groups, prepared))


@dataclasses.dataclass(frozen=True)
class Roomy(Limits):
    """Memory forces nothing."""

    alpha: float = 8.0


@pytest.mark.medium
def test_a_calibration_decides_what_is_spread(tmp_path, monkeypatch):
    """On links that take for ever nothing is; the file that a run names is read once, a missing one is named."""
    groups, prepared = make_groups([[60], [30], [9], [4]], [[4], [3], [2], [1]])
    monkeypatch.setattr(spreading, "Limits", Roomy)
    config = spread_config()
    free = compose(groups, prepared, config, 4, text=tiny((8, 2)).config.text)
    cost = published()
    within = dataclasses.replace(cost.within, per_byte=1e9 * cost.within.per_byte)
    save(dataclasses.replace(cost, within=within), tmp_path / "slow.json")
    config.sharding.calibration = str(tmp_path / "slow.json")
    dear = compose(groups, prepared, config, 4, text=tiny((8, 2)).config.text)
    degrees = [max(one.layout.plan.degrees) for step in (free, dear) for one in step.microbatches]
    assert degrees[0] > 1 and degrees[1] == 1
    config.sharding.calibration = str(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"sharding\.calibration.*none\.json"):
        compose(groups, prepared, config, 4, text=tiny((8, 2)).config.text)


def assert_close(got, want, tolerance):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


@pytest.mark.long
@pytest.mark.turn(1)
def test_strategies_may_change_between_steps():
    """Parameters and optimizer state have one layout: a run that changes its strategy at every step ends as FSDP."""
    order = [(FLEX, {}), (ODC, {"hybrid": False}), (FSDP, {}), (ULYSSES, {}), (ODC, HYBRID)]
    ends = []
    for steps in ([(FSDP, {})] * len(order), order):
        config = spread_config(deterministic=True)
        config.optim.eps = 1e-2  # Adam divides by tiny second moments, which would turn rounding into whole steps
        one = Learner(config, tiny(HEADS), grpo.token_loss, mesh=make_mesh(4))
        metrics = []
        for seed, (strategy, hybrid) in zip((0, 11, 0, 11, 0), steps, strict=True):
            choose(config, strategy, deterministic=True, **hybrid)
            vars(one.gradients).pop("odc", None)  # as a new process would begin
            composition = composed(config, seed, 4, shapes=SHAPES if strategy is ODC else None)
            found = one.step(composition.microbatches)
            assert (strategy is ODC) == ("seconds/idle" in found)
            metrics.append({name: value for name, value in found.items() if name != "seconds/idle"})
        ends.append((one.params, metrics))
    (want, want_metrics), (got, got_metrics) = ends
    for mine, theirs in zip(got_metrics, want_metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert_close(got, want, 1e-5)


@pytest.mark.medium
def test_hosts_that_the_mesh_can_not_be_cut_into_are_refused():
    with pytest.raises(ConfigError, match=r"sharding\.devices_per_host is 8: no group of 8 devices"):
        Learner(spread_config(ODC, hybrid=True), tiny(HEADS), grpo.token_loss, mesh=make_mesh(4))


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
    assert "sharding.strategy.max_degree" in str(caught.value)


def test_a_sequence_longer_than_all_devices_is_refused():
    groups, prepared = make_groups([[1100]], [[3]])
    config = make_config(tokens_per_row=32, rows=4)
    config.sharding.strategy = FLEX()
    with pytest.raises(ConfigError, match=r"sequence 0 has 1103 tokens, but 8 devices hold 1024"):
        compose(groups, prepared, config, DEVICES, text=tiny((8, 2)).config.text)


def test_media_that_no_device_can_hold_are_refused():
    groups, prepared = make_groups([[1, (1, 16, 16)]], [[3]])
    with pytest.raises(ConfigError, match="patches_per_device = 128"):
        compose(groups, prepared, spread_config(), DEVICES, vision=MODEL.vision, text=tiny((8, 2)).config.text)


def test_more_than_one_microbatch_when_memory_asks_for_it():
    groups, prepared = make_groups([[60]] * 40, [[4]] * 40)
    config = make_config(tokens_per_row=64, rows=2)
    config.sharding.strategy = FLEX()
    composition = compose(groups, prepared, config, DEVICES, text=tiny((8, 2)).config.text)
    assert len(composition.batches) > 1 and len(composition.keys) == 40
    assert all(batch.inputs.tokens_BT.shape[1] <= 128 for batch in composition.batches)
    trained = sum(int((batch.loss_weights_BT != 0).sum()) for batch in composition.batches)
    assert trained == 160


def test_rollouts_may_be_longer_than_a_row_but_not_than_all_devices_of_a_sequence():
    longer = ["--config.packing.tokens_per_row=64", "--config.rollout.max_sequence_tokens=99"]
    cli.load(["--config=configs/text.py", *longer, "--config.sharding.strategy=flex_ulysses"])
    with pytest.raises(ConfigError, match="tokens_per_row"):
        cli.load(["--config=configs/text.py", *longer])
    config, text = spread_config(), tiny((8, 2)).config.text  # 256 tokens a device
    config.rollout.max_sequence_tokens = 2048
    Composer(config, DEVICES, text=text).check()
    config.rollout.max_sequence_tokens = 2049
    with pytest.raises(ConfigError, match=r"max_sequence_tokens is 2049.*hold 2048"):
        Composer(config, DEVICES, text=text).check()


@pytest.mark.medium
def test_a_mesh_with_further_replicas_is_refused():
    groups, prepared = make_groups([[20], [5]], [[4], [3]])
    text = tiny((8, 2)).config.text
    [batch] = compose(groups, prepared, spread_config(), 4, vision=MODEL.vision, text=text).batches
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "s0"))
    one = Learner(make_config(), tiny((8, 2)), grpo.token_loss, mesh=mesh)
    with pytest.raises(ValueError, match="make_mesh"):
        one.logprobs(batch.inputs)
