"""Direct preference optimisation: pairs, loss and slopes in float64, and gradients against those of the loss itself,
differentiated as a whole, however its two responses are laid out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_cases import flags, letters
from step_cases import VERSION, composed, flat, key_of, near_policy, samples_of, trainer_of
from test_algorithms import finite_differences, group

import models
from fluxjax.algorithms import ALGORITHMS, RLAlgorithm
from fluxjax.batch.composer import Team
from fluxjax.config import AlgorithmConfig, ConfigError, cli
from fluxjax.learner.loss_inputs import coupled, logprobs_of
from fluxjax.learner.policy_trainer import Portion, check_algorithm
from fluxjax.report.metrics import read
from fluxjax.run.trainer import FluxTrainer
from models.decoder import logprobs as model_logprobs
from sharding.walk import Walk

DPO = ALGORITHMS["dpo"]
CFG = AlgorithmConfig.of("dpo", kl_coefficient=0.7)


def advantages_of(groups):
    return [[sample.advantage for sample in one.samples] for one in DPO.advantages(groups, CFG)]


# --- pairs and slopes ------------------------------------------------------------------------------


def test_the_best_and_the_worst_are_a_pair():
    got = advantages_of([group([0.5, 2.0, -1.0, 0.0]), group([1.0, 0.0, 1.0, 0.0], 1), group([3.0, 3.0], 2)])
    assert got == [[0, 1, -1, 0], [1, -1, 0, 0], [0, 0]], "of equal ones the first; no pair where all are equal"
    assert advantages_of([group([4.0])]) == [[0]]
    got = advantages_of([group([0.3, 0.1 + 0.2]), group([0.3, 0.1 + 0.2, 0.0, 0.3 - 0.1 - 0.2], 1)])
    assert got == [[0, 0], [1, 0, -1, 0]], "those that are equal but for rounding are equal"


rewards = st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=5), min_size=1, max_size=4)


@given(rewards, st.integers(0, 2**16))
def test_loss_and_slopes_are_the_papers(values, seed):
    rng = np.random.default_rng(seed)
    groups = DPO.advantages([group(map(float, some), draw) for draw, some in enumerate(values)], CFG)
    keys = [key_of(sample) for one in groups for sample in one.samples]
    ratios = rng.normal(scale=3.0, size=len(keys))
    slopes, metrics = DPO.couple(groups, dict(zip(keys, ratios.tolist(), strict=True)), CFG)
    rows = [(max(some), min(some), draw, some) for draw, some in enumerate(values) if max(some) > min(some)]
    pairs = [(keys.index((d, s.index(best))), keys.index((d, s.index(worst)))) for best, worst, d, s in rows]
    assert metrics["dpo/pairs"] == len(pairs)

    def loss(x):
        return -np.mean([np.log(1 / (1 + np.exp(-0.7 * (x[c] - x[r])))) for c, r in pairs])

    if not pairs:
        assert not slopes and metrics == {"loss": 0.0, "dpo/pairs": 0.0}
        return
    margins = [0.7 * (ratios[c] - ratios[r]) for c, r in pairs]
    assert metrics["loss"] == pytest.approx(loss(ratios), rel=1e-9)
    assert metrics["dpo/margin"] == pytest.approx(np.mean(margins), rel=1e-9)
    assert metrics["dpo/accuracy"] == np.mean(np.array(margins) > 0)
    assert metrics["dpo/chosen"] - metrics["dpo/rejected"] == pytest.approx(metrics["dpo/margin"], abs=1e-9)
    got = [slopes.get(key, 0.0) for key in keys]
    np.testing.assert_allclose(got, finite_differences(loss, ratios), atol=1e-7)


@pytest.mark.parametrize("ratio", [-1e4, 1e4])
def test_pairs_far_apart_have_finite_slopes(ratio):
    groups = DPO.advantages([group([1.0, 0.0])], CFG)
    slopes, metrics = DPO.couple(groups, {(0, 0): ratio, (0, 1): -ratio}, CFG)
    assert np.isfinite(list(metrics.values())).all()
    assert slopes[0, 0] == pytest.approx(-0.7 if ratio < 0 else 0.0)


# --- whole steps -------------------------------------------------------------------------------------


@functools.cache
def scored():
    """Groups of which one is of equal rewards, and one prefers a response without a token."""
    groups, prepared, own = near_policy()

    def rewarded(one, values):
        samples = zip(one.samples, values, strict=True)
        given = [dataclasses.replace(s, reward=dataclasses.replace(s.reward, value=v)) for s, v in samples]
        return dataclasses.replace(one, samples=tuple(given))

    values = [[0.0, 1.0, 0.5], [0.2, 0.9, 0.1], [1.0, 0.0], [1.0, 1.0]]
    return [rewarded(one, some) for one, some in zip(groups, values, strict=True)], prepared, own


PAIRS = [((100, 1), (100, 0)), ((103, 1), (103, 2)), ((106, 0), (106, 1))]


def computed(layout: str):
    """(gradients, what was found, trained tokens) of one step under a layout."""
    trainer, learner = trainer_of(CFG, layout, referred=True)
    groups, prepared, _ = scored()
    part = Portion(DPO.advantages(groups, CFG), prepared)
    [composition] = composed(trainer, [part])
    now = logprobs_of(composition, learner.gradients, learner.params)
    composition, found = coupled(composition, now, part.groups, DPO, CFG, Team())
    grads, tally = learner.gradients.accumulate(learner.params, composition.microbatches)
    return jax.tree.map(np.asarray, grads), found, float(tally.sums["trained_tokens"])


@functools.cache
def differentiated():
    """(loss, gradients) of the paper's equation 7 as one function of the weights."""
    trainer, learner = trainer_of(CFG, "one row", referred=True)
    _, prepared, _ = scored()
    [composition] = composed(trainer, [Portion(near_policy()[0], prepared)])
    graphdef, _ = models.split(learner.gradients._model)
    ends = np.cumsum([0, *composition.lengths])
    cells = {key: composition.cells[ends[i] : ends[i + 1]] for i, key in enumerate(composition.keys)}

    def whole(params):
        model = models.merge(graphdef, params)
        [batch] = composition.batches
        return model_logprobs(model, batch.inputs, Walk())[0].reshape(-1)

    reference = whole(trainer._models.reference)

    def loss(params):
        ratios = whole(params) - reference
        own = [[jnp.sum(ratios[cells[key]]) if key in cells else 0.0 for key in pair] for pair in PAIRS]
        return sum(-jax.nn.log_sigmoid(CFG.kl_coefficient * (chosen - rejected)) for chosen, rejected in own) / 3

    return jax.jit(jax.value_and_grad(loss))(learner.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "rows",
        pytest.param("flex_ulysses", marks=[pytest.mark.long, pytest.mark.turn(0)]),
        pytest.param("odc", marks=[pytest.mark.long, pytest.mark.turn(1, 2)]),
    ],
)
def test_every_layout_has_the_gradient_of_the_whole_loss(layout):
    want_loss, want = differentiated()
    got, found, tokens = computed(layout)
    assert found["loss"] == pytest.approx(float(want_loss), abs=1e-5)
    assert found["dpo/pairs"] == 3
    assert tokens == 1 + 3 + 4 + 9 + 5, "responses in no pair are not computed"

    def close(mine, theirs):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())

    jax.tree.map(close, got, want)
    assert max(np.abs(x).max() for x in jax.tree.leaves(want)) > 1e-3


def trained(**updates):
    trainer, learner = trainer_of(dataclasses.replace(CFG, **updates), referred=True)
    groups, prepared, _ = scored()
    return trainer.train(0, groups, prepared), learner


@pytest.mark.slow
def test_a_step_reports_the_loss_and_keeps_all_groups():
    """Slopes are those of the policy before each optimizer step."""
    step, learner = trained()
    assert step.metrics["loss"] == pytest.approx(float(differentiated()[0]), abs=1e-5)
    assert step.metrics["grad_norm"] > 1e-3 and learner.version == VERSION + 1
    assert step.metrics["groups/zero_variance"] == 0.25
    assert [len(one.samples) for one in step.groups] == [3, 3, 2, 2]
    assert len(samples_of(step.groups)) == 9
    several, _ = trained(epochs=3)
    assert several.metrics["updates"] == 3
    assert several.metrics["loss"] < step.metrics["loss"] - 1e-3, "the mean of three: it falls with each"


@pytest.mark.slow
def test_a_step_of_equal_rewards_moves_nothing():
    trainer, learner = trainer_of(CFG, referred=True)
    _, prepared, _ = scored()
    before = flat(learner)
    step = trainer.train(0, [scored()[0][3]], prepared)
    assert (step.metrics["loss"], step.metrics["dpo/pairs"], step.metrics["grad_norm"]) == (0.0, 0.0, 0.0)
    np.testing.assert_array_equal(flat(learner), before)


# --- what is refused ---------------------------------------------------------------------------------


def test_what_can_not_couple_responses_is_refused():
    config = cli.load(["--config.algorithm.name=dpo"])
    check_algorithm(config, DPO)
    for name in ("stream_trainer", "speculative_sync"):
        config = cli.load(
            ["--config.algorithm.name=dpo", f"--config.{name}={'true' if name == 'stream_trainer' else 0.5}"]
        )
        with pytest.raises(ConfigError, match=rf"{name} .* = dpo depend on all responses of the step"):
            check_algorithm(config, DPO)


def test_a_coupled_algorithm_of_ones_own_needs_a_reference():
    class Mine(RLAlgorithm):
        coupled = True

    with pytest.raises(ConfigError, match=r"compares with a reference: algorithm.kl_coefficient must be above 0"):
        check_algorithm(cli.load([]), Mine())


# --- a run ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_learns_what_is_preferred(tmp_path):
    own = {"steps": 40, "evaluation__every": 0, "checkpoint__every": 0, "algorithm__name": "dpo"}
    own |= {"algorithm__entropy_coefficient": 0, "run_dir": tmp_path / "run"} | letters(tmp_path)
    with FluxTrainer(cli.load(["--config=configs/text.py", *flags(**own)])) as trainer:
        trainer.fit()
    rows = [row for row in read(tmp_path / "run" / "metrics.jsonl") if row["phase"] == "rl"]
    rewards = [row["reward/mean"] for row in rows]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.1
    assert rows[0]["dpo/margin"] == pytest.approx(0.0, abs=1e-5), "the policy is the reference yet"
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert np.mean([row["dpo/accuracy"] for row in rows[-10:] if row["dpo/pairs"]]) > 0.7
