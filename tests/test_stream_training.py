"""A step whose gradients were computed in portions, on other devices and earlier, equals the step at once."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from learner_cases import tiny
from packing_cases import TEXT, make_config, make_groups

from fluxjax.algorithms import ALGORITHMS, RLAlgorithm, grpo
from fluxjax.base.types import Group
from fluxjax.batch.composer import Composer
from fluxjax.config import FSDP, ODC, Config, ImportanceLevel, LossAggregation
from fluxjax.learner.learner import Learner
from fluxjax.learner.policy_trainer import PolicyTrainer
from fluxjax.learner.run_models import RunModels
from sharding.mesh import make_mesh

pytestmark = pytest.mark.slow

LENGTHS = [[3, 1, 6], [4, 4, 2], [2, 5, 7], [6, 3, 1], [8, 2, 9], [1, 2, 3], [0, 5, 2]]
VERSION = 8  # the newest that tokens are of
TOLERANCE = 1e-6  # of the largest magnitude in each array


@dataclasses.dataclass
class Engine:
    devices: tuple


def config_for(aggregation: LossAggregation, strategy: type = FSDP) -> Config:
    config = make_config(rows=2)
    config.algorithm.loss_aggregation = aggregation
    config.sharding.strategy = strategy()
    config.optim.eps, config.optim.lr = 1e-2, 1e-2  # Adam turns rounding of near-zero gradients into whole steps
    return config


def trainer(
    config: Config, devices: int = 4, reference: bool = False, algorithm: RLAlgorithm = ALGORITHMS["grpo"]
) -> PolicyTrainer:
    """On four devices; two engines on the first two of them."""
    learner = Learner(config, tiny(None, TEXT), grpo.token_loss, mesh=make_mesh(devices))
    learner.version = VERSION
    engines = [Engine((device,)) for device in jax.devices()[:2]]
    frozen = jax.tree.map(lambda weight: 0.9 * weight, learner.params) if reference else None
    run_models = RunModels(config, algorithm, learner, reference=frozen)
    return PolicyTrainer(config, run_models, Composer(config, devices, text=learner.text), engines)


def scored(idle: tuple[int, ...] = ()):
    """Groups and prompts; those of `idle` have equal rewards."""
    groups, prepared = make_groups([[5 + i] for i in range(len(LENGTHS))], LENGTHS, seed=3)
    for i in idle:
        same = groups[i].samples[0].reward
        samples = tuple(dataclasses.replace(sample, reward=same) for sample in groups[i].samples)
        groups[i] = Group(groups[i].prompt, samples)
    return groups, prepared


def streamed(one: PolicyTrainer, groups, prepared, portions: list[tuple[list[int], tuple[int, ...]]], step: int = 1):
    """Those groups first, each portion on these engines, then the rest."""
    early = set()
    for indices, engines in portions:
        early |= set(indices)
        some = [groups[i] for i in indices]
        one.accumulate(step, some, {g.prompt.draw: prepared[g.prompt.draw] for g in some}, engines)
    rest = [group for i, group in enumerate(groups) if i not in early]
    return one.train(step, rest, {g.prompt.draw: prepared[g.prompt.draw] for g in rest})


def difference(one: PolicyTrainer, other: PolicyTrainer) -> float:
    """The largest, of the largest magnitude in each array."""

    def of(a, b) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / np.abs(b).max())

    return max(jax.tree.leaves(jax.tree.map(of, one.weights(), other.weights())))


PORTIONS = [([2, 5], (1,)), ([0], (1,)), ([6], (1,)), ([3], ())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregation",
    [pytest.param(a, marks=() if a is LossAggregation.TOKEN_MEAN else pytest.mark.long) for a in LossAggregation],
)
def test_equals_the_step_at_once(aggregation: LossAggregation) -> None:
    """Two steps: parameters and metrics, whatever the loss is normalised by. Three portions on the device of an engine,
    one on all; each has another number of tokens and responses."""
    config = config_for(aggregation)
    one, other = trainer(config), trainer(config)
    groups, prepared = scored()
    for step in (1, 2):
        got, want = streamed(one, groups, prepared, PORTIONS, step), other.train(step, groups, prepared)
        assert difference(one, other) < TOLERANCE
        assert [g.prompt.draw for g in got.groups] == [g.prompt.draw for g in groups]
        got, want = dict(got.metrics), want.metrics
        assert got.pop("stream/groups") == 5.0
        for name in want:
            if not name.startswith("packing/"):
                assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), name
    assert one.version == other.version == VERSION + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("idle", "portions"),
    [
        ((2, 5), [([2, 5], (1,)), ([0], (1,))]),  # a portion that teaches nothing
        ((0, 1, 2, 3, 4, 5), [([0, 1], (1,)), ([2, 3], ())]),  # all but the last group
        ((4,), [([0, 1, 2, 3], (1,)), ([5, 6], (1,))]),  # nothing but an idle group is left
        ((), [([0, 1, 2], (0,)), ([3, 4, 5, 6], (0,))]),  # nothing is left at all
        (tuple(range(7)), [([0, 1], (1,))]),  # nobody teaches anything
    ],
)
def test_idle_groups(idle, portions) -> None:
    """Groups that teach nothing are left out as in a step at once, and count for the normaliser as there."""
    config = config_for(LossAggregation.TOKEN_MEAN)
    groups, prepared = scored(idle)
    one, other = trainer(config), trainer(config)
    got, want = streamed(one, groups, prepared, portions), other.train(1, groups, prepared)
    assert difference(one, other) < TOLERANCE
    assert got.metrics["trained_tokens"] == want.metrics["trained_tokens"]


def test_an_own_algorithm_gets_all_groups() -> None:
    """Groups without any advantage have no gradient under the built-in ones; nobody knows what another loss does."""
    config = config_for(LossAggregation.TOKEN_MEAN)
    groups, prepared = scored((0, 1, 2, 3))
    built_in, own = trainer(config), trainer(config, algorithm=OwnAlgorithm())
    sizes = [one.train(1, groups, prepared).metrics["trained_tokens"] for one in (built_in, own)]
    assert sizes == [sum(map(sum, LENGTHS[4:])), sum(map(sum, LENGTHS))]


class OwnAlgorithm(grpo.GRPO):
    idle_without_advantage = RLAlgorithm.idle_without_advantage


@pytest.mark.slow
def test_reference_and_sequence_weights() -> None:
    """KL to a reference, and importance weights of whole responses, are computed where the portion is."""
    config = config_for(LossAggregation.SEQUENCE_MEAN)
    config.algorithm.kl_coefficient = 0.1
    config.algorithm.importance.level = ImportanceLevel.SEQUENCE
    groups, prepared = scored()
    one, other = trainer(config, 1, reference=True), trainer(config, 1, reference=True)
    got, want = streamed(one, groups, prepared, PORTIONS[:2]), other.train(1, groups, prepared)
    assert difference(one, other) < TOLERANCE
    assert got.metrics["reference_kl"] == pytest.approx(want.metrics["reference_kl"], rel=1e-5) != 0


@pytest.mark.long
def test_odc() -> None:
    """Each portion by whole sequences on the devices it has."""
    config = config_for(LossAggregation.TOKEN_MEAN, ODC)
    config.packing.rows_per_device = 4  # rollout.max_sequence_tokens fit one device
    groups, prepared = scored()
    one, other = trainer(config, 1), trainer(config, 1)
    streamed(one, groups, prepared, [([2, 5], (1,))]), other.train(1, groups, prepared)
    assert difference(one, other) < TOLERANCE
