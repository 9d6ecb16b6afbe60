"""Every built-in objective against its paper's formula, written down once more in float64, with finite differences; and
what must not change it: where a token lies, padding, the order of responses, the split into microbatches.

The formulas here are derived anew from the papers. No other library's losses are imported.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithms import TOLERANCE, advantages_of, finite_differences, group, make_batch
from turns import third_of

from fluxjax.algorithms import ALGORITHMS, RLAlgorithm
from fluxjax.algorithms.loss import kl_estimate, response_weights
from fluxjax.base.types import Group
from fluxjax.config import AlgorithmConfig, ConfigError, KlEstimator, LossAggregation, cli
from fluxjax.learner.policy_trainer import check_algorithm

LENGTHS = (3, 1, 5, 4, 2, 6)  # of responses
MAX_NEW_TOKENS = 8
NAMES = [name for name in ALGORITHMS if name != "sft"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Responses with their tokens' values, response after response."""

    lengths: tuple[int, ...]
    advantages: np.ndarray  # of each response
    behaviour: np.ndarray
    policy: np.ndarray
    reference: np.ndarray

    @property
    def ends(self):
        return np.cumsum(self.lengths)[:-1]

    def of_tokens(self, values):
        return np.repeat(values, self.lengths)


def case(seed, spread=0.9, lengths=LENGTHS):
    """Ratios of tokens from about 0.4 to 2.5 (with `spread` 0.9), nothing near where an objective has a corner."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    behaviour = -rng.uniform(0.5, 3.0, total)
    policy = behaviour + rng.uniform(-spread, spread, total)
    values = [rng.normal(size=len(lengths)), behaviour, policy, behaviour + 0.5 * rng.normal(size=total)]
    advantages, *rest = (value.astype(np.float32).astype(np.float64) for value in values)
    return Case(lengths, advantages, *rest)


def laid_out(case, cfg, cells=None, shape=(4, 8)):
    """The batch with the responses' tokens in these cells, and its log-probs; noise elsewhere."""
    cells = np.arange(sum(case.lengths)) if cells is None else cells
    weights = response_weights(np.array(case.lengths), cfg.loss_aggregation, MAX_NEW_TOKENS)
    means = [part.mean() for part in np.split(case.policy - case.behaviour, case.ends)]
    values = {
        "loss_weights_BT": case.of_tokens(weights),
        "advantages_BT": case.of_tokens(case.advantages),
        "behaviour_logprobs_BT": case.behaviour,
        "reference_logprobs_BT": case.reference,
        "policy_log_ratios_BT": case.of_tokens(means),
    }
    arrays = {}
    for name, value in values.items():
        flat = np.zeros(shape[0] * shape[1], np.float32)
        flat[cells] = value
        arrays[name] = jnp.asarray(flat.reshape(shape))
    logprobs = np.full(shape[0] * shape[1], -7.0, np.float32)
    logprobs[cells] = case.policy
    batch = make_batch(np.random.default_rng(0), np.ones(shape, bool), np.zeros(shape))
    return jnp.asarray(logprobs.reshape(shape)), dataclasses.replace(jax.tree.map(jnp.asarray, batch), **arrays)


def objective(name, cfg, logprobs, batch):
    entropies = jnp.ones_like(logprobs)
    return jnp.sum(batch.loss_weights_BT * ALGORITHMS[name].token_loss(logprobs, entropies, batch, cfg)[0])


# --- the papers' formulas ------------------------------------------------------------------------


def clipped(ratio, advantage, cfg, dual=True):
    bounded = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
    least = cfg.dual_clip * advantage if dual and cfg.dual_clip and advantage < 0 else -np.inf
    return max(min(ratio * advantage, bounded * advantage), least)


def paper(name, cfg, case, policy):
    """The loss of a step as its paper has it: sums over responses and tokens, in plain numbers."""
    responses = zip(
        *(np.split(array, case.ends) for array in (policy, case.policy, case.behaviour, case.reference)),
        case.advantages,
        strict=True,
    )
    total, count = 0.0, len(case.lengths)
    for now, start, behaviour, reference, advantage in responses:
        losses = np.zeros(len(now))
        if name == "gspo":
            losses[:] = -clipped(np.exp((now - behaviour).mean()), advantage, cfg, dual=False)
        for t in range(len(now)):
            ratio = np.exp(now[t] - behaviour[t])
            if name == "cispo":
                weight = np.clip(np.exp(start[t] - behaviour[t]), 1 - cfg.clip_low, 1 + cfg.clip_high)
                losses[t] = -weight * advantage * now[t]
            elif name == "distillation":
                teacher = cfg.kl_coefficient * advantage * (reference[t] - start[t])
                losses[t] = -clipped(ratio, teacher, cfg)
            elif name != "gspo":
                losses[t] = -clipped(ratio, advantage, cfg)
            if cfg.kl_coefficient and name != "distillation" and not cfg.kl_in_reward:
                behind = reference[t] - now[t]
                kl = {"k1": -behind, "k2": behind**2 / 2, "k3": np.exp(behind) - behind - 1}
                losses[t] += cfg.kl_coefficient * kl[cfg.kl_estimator.value]
        divisor = {
            LossAggregation.TOKEN_MEAN: sum(case.lengths),
            LossAggregation.SEQUENCE_MEAN: count * len(now),
            LossAggregation.CONSTANT: count * MAX_NEW_TOKENS,
        }[cfg.loss_aggregation]
        total += losses.sum() / divisor
    return total


CONFIGS = {
    **{name: AlgorithmConfig.of(name) for name in NAMES if name != "dpo"},  # whose pairs: test_dpo.py
    "gspo-wide": AlgorithmConfig.of("gspo", clip_low=0.1, clip_high=0.15, kl_coefficient=0.2),
    "cispo-narrow": AlgorithmConfig.of("cispo", clip_low=0.3, clip_high=0.4),
    "grpo-dual": AlgorithmConfig.of("grpo", dual_clip=1.4),
    **{f"grpo-{k.value}": AlgorithmConfig.of("grpo", kl_coefficient=0.3, kl_estimator=k) for k in KlEstimator},
    "dr_grpo-kl": AlgorithmConfig.of("dr_grpo", kl_coefficient=0.3),
    **{f"dapo-{a.value}": AlgorithmConfig.of("dapo", loss_aggregation=a) for a in LossAggregation},
}


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("key", CONFIGS)
def test_loss_and_gradient_are_the_papers(key, seed):
    cfg = CONFIGS[key]
    data = case(seed)
    logprobs, batch = laid_out(data, cfg)
    value, gradient = jax.value_and_grad(lambda x: objective(cfg.name, cfg, x, batch))(logprobs)
    want = functools.partial(paper, cfg.name, cfg, data)
    np.testing.assert_allclose(value, want(data.policy), atol=TOLERANCE)
    flat = np.asarray(gradient).reshape(-1)
    np.testing.assert_allclose(flat[: sum(LENGTHS)], finite_differences(want, data.policy), atol=TOLERANCE)
    assert not flat[sum(LENGTHS) :].any()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "distillation"])
def test_on_policy_all_have_the_policy_gradient(name):
    """At a ratio of 1, whatever is clipped how: weights times advantages."""
    cfg = AlgorithmConfig.of(name, kl_coefficient=0.0, kl_in_reward=False)
    data = case(3)
    data = dataclasses.replace(data, behaviour=data.policy)
    logprobs, batch = laid_out(data, cfg)
    gradient = jax.grad(lambda x: objective(name, cfg, x, batch))(logprobs)
    np.testing.assert_allclose(gradient, -batch.loss_weights_BT * batch.advantages_BT, atol=1e-7)


# --- invariances -----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None, max_examples=third_of(12))
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**16), data=st.data())
def test_neither_place_nor_padding_nor_order_nor_split_count(name, seed, data):
    cfg = AlgorithmConfig.of(name, kl_coefficient=0.2, entropy_coefficient=0.01)
    one = case(seed)
    logprobs, batch = laid_out(one, cfg)
    value, gradient = jax.value_and_grad(lambda x: objective(name, cfg, x, batch))(logprobs)
    rows = data.draw(st.integers(3, 6))
    cells = np.array(data.draw(st.permutations(range(8 * rows))))[: sum(LENGTHS)]
    moved, there = laid_out(one, cfg, cells, (rows, 8))
    value_there, gradient_there = jax.value_and_grad(lambda x: objective(name, cfg, x, there))(moved)
    np.testing.assert_allclose(value_there, value, atol=1e-6)
    flat = np.asarray(gradient).reshape(-1)[: sum(LENGTHS)]
    np.testing.assert_allclose(np.asarray(gradient_there).reshape(-1)[cells], flat, atol=1e-7)
    cut = data.draw(st.integers(1, rows - 1))
    fields = [field.name for field in dataclasses.fields(there) if field.name.endswith("_BT")]
    parts = 0.0
    for rows_of in (slice(0, cut), slice(cut, None)):
        some = {field: getattr(there, field)[rows_of] for field in fields if getattr(there, field) is not None}
        parts += float(objective(name, cfg, moved[rows_of], dataclasses.replace(there, **some)))
    assert parts == pytest.approx(float(value), abs=1e-6)


# --- advantages ------------------------------------------------------------------------------------


def with_lengths(groups, lengths):
    """The groups with responses of so many tokens."""
    sizes = iter(lengths)

    def longer(sample):
        count = next(sizes)
        tokens = {"token_ids": (1,) * count, "logprobs": (-1.0,) * count, "versions": (0,) * count}
        return dataclasses.replace(sample, response=dataclasses.replace(sample.response, **tokens))

    return [Group(one.prompt, tuple(map(longer, one.samples))) for one in groups]


def test_leave_one_out_by_hand():
    # The others' means of rewards 1, 0, 0, 2 are 2/3, 1, 1, 1/3.
    groups = [group([1.0, 0.0, 0.0, 2.0]), group([5.0], 1)]
    got, alone = advantages_of(ALGORITHMS["rloo"].advantages(groups, AlgorithmConfig()))
    np.testing.assert_allclose(got, [1 / 3, -1.0, -1.0, 5 / 3], rtol=1e-12)
    assert alone == [0.0]


def test_reinforce_plus_plus_by_hand():
    # Rewards 1 and 0 with 3 tokens and 1: mean 3/4, variance (3/16 + 9/16) / 3 = 1/4.
    groups = with_lengths([group([1.0]), group([0.0], 1)], [3, 1])
    got = advantages_of(ALGORITHMS["reinforce_plus_plus"].advantages(groups, AlgorithmConfig()))
    np.testing.assert_allclose(got, [[0.5], [-1.5]], rtol=1e-6)
    # With baselines: groups (1, 0) and (4, 4) become (1/2, -1/2) and (0, 0); a token each: variance 1/2 / 3.
    groups = with_lengths([group([1.0, 0.0]), group([4.0, 4.0], 1)], [1, 1, 1, 1])
    got = advantages_of(ALGORITHMS["reinforce_plus_plus_baseline"].advantages(groups, AlgorithmConfig()))
    np.testing.assert_allclose(got, [[0.5 * 6**0.5, -0.5 * 6**0.5], [0.0, 0.0]], atol=1e-6)
    assert advantages_of(ALGORITHMS["reinforce_plus_plus"].advantages([group([2.0])], AlgorithmConfig())) == [[0.0]]


rewards = st.lists(st.lists(st.integers(-4, 4), min_size=2, max_size=5), min_size=1, max_size=4)


comparing = [name for name in NAMES if name not in ("distillation", "ppo")]


@given(rewards, st.integers(-3, 3), st.sampled_from(comparing), st.randoms())
def test_advantages_ignore_what_they_should(values, shift, name, random):
    """A constant added to all rewards; the order of groups and of responses; and they favour nobody: the mean is 0."""
    algorithm, cfg = ALGORITHMS[name], AlgorithmConfig.of(name)
    sizes = [random.randint(1, 5) for group_values in values for _ in group_values]
    groups = with_lengths([group(map(float, some), draw) for draw, some in enumerate(values)], sizes)
    got = dict(keyed(algorithm.advantages(groups, cfg)))
    shifted = with_lengths([group([float(x + shift) for x in some], draw) for draw, some in enumerate(values)], sizes)
    moved = [Group(g.prompt, tuple(random.sample(g.samples, len(g.samples)))) for g in shifted]
    other = dict(keyed(algorithm.advantages(random.sample(moved, len(moved)), cfg)))
    assert other == pytest.approx(got, abs=1e-6)
    weights = sizes if algorithm.whole_step and name == "reinforce_plus_plus" else None
    if weights is not None or not algorithm.whole_step:
        assert np.average(list(got.values()), weights=weights) == pytest.approx(0.0, abs=1e-6)


def keyed(groups):
    return [((s.response.draw, s.response.sample), s.advantage) for one in groups for s in one.samples]


# --- KL estimators ---------------------------------------------------------------------------------


@pytest.mark.medium
def test_what_the_estimators_are_on_average():
    """Over all tokens of a small vocabulary: k1 and k3 are KL(policy || reference), the gradient of k2 is KL's, that of
    k1 is 0."""
    rng = np.random.default_rng(0)
    logits, others = (jnp.asarray(rng.normal(size=6), jnp.float32) for _ in range(2))
    reference = jax.nn.log_softmax(others)

    def kl(x):
        return jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference))

    def mean_gradient(estimator):
        """Of the estimator as a loss: tokens are drawn, so that their probabilities are constants."""
        fixed = jax.lax.stop_gradient(jax.nn.softmax(logits))
        return jax.grad(lambda x: jnp.sum(fixed * kl_estimate(reference - jax.nn.log_softmax(x), estimator)))(logits)

    probabilities, behind = jax.nn.softmax(logits), reference - jax.nn.log_softmax(logits)
    for estimator in (KlEstimator.K1, KlEstimator.K3):
        np.testing.assert_allclose(jnp.sum(probabilities * kl_estimate(behind, estimator)), kl(logits), rtol=1e-4)
    np.testing.assert_allclose(mean_gradient(KlEstimator.K2), jax.grad(kl)(logits), atol=1e-5)
    np.testing.assert_allclose(mean_gradient(KlEstimator.K1), np.zeros(6), atol=1e-6)
    assert np.abs(jax.grad(kl)(logits)).max() > 0.05


# --- settings --------------------------------------------------------------------------------------


def test_advantages_of_a_whole_step_are_not_streamed():
    config = cli.load(["--config.algorithm.name=reinforce_plus_plus", "--config.speculative_sync=0.5"])
    with pytest.raises(ConfigError, match=r"speculative_sync .* = reinforce_plus_plus depend on all responses"):
        check_algorithm(config, ALGORITHMS["reinforce_plus_plus"])
    check_algorithm(config, RLAlgorithm())
