"""No layout of a training step changes where it leads: metrics, advantages and weights are those of one row; and the
importance correction of whole steps is that of the formula."""

import jax
import numpy as np
import pytest
from packing_cases import TEXT, compose
from step_cases import LAYOUTS, SEQUENCE, TOKEN, VERSION, config_for, flat, key_of, near_policy, samples_of, trained
from test_importance import TOLERANCE, weight_of
from turns import by_turns

from fluxjax.batch.composer import Team
from fluxjax.batch.composition import unpack
from fluxjax.config import Importance, ImportanceConfig, ImportanceLevel
from fluxjax.learner.loss_inputs import with_importance

# Each loss has a case that spreads sequences and one of ODC; importance weights, minibatches and epochs have a case of
# each strategy between them. `test_dpo` has the gradients of dpo, whose loss is of pairs.
PAIRS = [
    ("grpo twice", "odc"),
    ("token weights twice", "fsdp"),
    ("response weights", "flex_ulysses"),
    ("gspo twice", "flex_ulysses"),
    ("gspo twice", "odc"),
    ("ppo twice", "fsdp"),
    ("ppo twice", "flex_ulysses"),
    ("ppo twice", "odc"),
]
EARLY = [("token weights twice", "fsdp"), ("gspo twice", "flex_ulysses")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"), by_turns(pytest.param(*pair, marks=() if pair in EARLY else pytest.mark.long) for pair in PAIRS)
)
def test_no_layout_changes_a_step(case, layout):
    (want, alone, critic), (got, spread, spread_critic) = trained(case), trained(case, layout)
    same = [key for key in want.metrics if not key.startswith(("packing/", "sharding/"))]
    assert {k: got.metrics[k] for k in same} == pytest.approx({k: want.metrics[k] for k in same}, rel=1e-4, abs=1e-5)
    tolerance = 2e-6 if "twice" in case else 1e-6
    np.testing.assert_allclose(flat(spread), flat(alone), rtol=0, atol=tolerance)
    if critic is not None:
        assert {"critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/clip_fraction"} <= set(same)
        np.testing.assert_allclose(flat(spread_critic), flat(critic), rtol=0, atol=tolerance)
    given = {key_of(sample): sample.advantage for sample in samples_of(want.groups)}
    assert {key_of(s): s.advantage for s in samples_of(got.groups)} == pytest.approx(given, abs=1e-4)


# --- the importance correction -------------------------------------------------------------------

NORMALIZED = ImportanceConfig(Importance.MASK, bounds=(0.7, 1.4), decay=0.9, normalize=True)


def expected(cfg: ImportanceConfig):
    """(ratios, ratios of the level, weights, lags) of each response: the formula in plain numpy."""
    groups, _, own = near_policy()
    found = {}
    for sample in samples_of(groups):
        ratios = np.exp(np.float64(own[key_of(sample)]) - np.array(sample.response.logprobs))
        level = np.full_like(ratios, np.prod(ratios) ** (1 / len(ratios)))
        level = level if cfg.level is ImportanceLevel.SEQUENCE else ratios
        lags = VERSION - np.array(sample.response.versions)
        weights = np.array([weight_of(ratio, lag, cfg) for ratio, lag in zip(level, lags, strict=True)])
        found[key_of(sample)] = ratios, level, weights, lags
    return found


def joined(found, index):
    return np.concatenate([values[index] for values in found.values()])


@pytest.mark.medium
@pytest.mark.parametrize("cfg", [NORMALIZED, SEQUENCE], ids=["normalized", "sequence"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_same_ratios_and_lags(name, cfg):
    groups, prepared, own = near_policy()
    devices, layout = LAYOUTS[name]
    plain = compose(groups, prepared, config_for(cfg, **layout), devices, text=TEXT.text, version=VERSION)
    composition = with_importance(plain, scattered(plain, own), cfg, Team())
    if name == "flex_ulysses":
        assert max(degree for batch in plain.batches for degree, _ in batch.inputs.spread.rounds) > 1
    found = expected(cfg)
    mean = joined(found, 2).mean()
    fields = ("response_log_ratios_BT", "advantages_BT", "lags_BT")
    ratios, advantages, lags = (
        unpack(composition, [getattr(batch, field) for batch in composition.batches]) for field in fields
    )
    for sample in samples_of(groups):
        key = key_of(sample)
        _, level, _, lag = found[key]
        np.testing.assert_array_equal(lags[key], lag)
        np.testing.assert_allclose(advantages[key], sample.advantage / mean, rtol=TOLERANCE)
        want = np.log(level) if cfg.level is ImportanceLevel.SEQUENCE else np.zeros_like(level)
        np.testing.assert_allclose(ratios[key], want, atol=TOLERANCE)
    for before, after in zip(plain.batches, composition.batches, strict=True):
        untrained = after.loss_weights_BT == 0
        assert (after.lags_BT[untrained] == -1).all() and not after.response_log_ratios_BT[untrained].any()
        assert after.advantages_BT.dtype == after.response_log_ratios_BT.dtype == np.float32
        assert jax.tree.map(np.shape, before) == jax.tree.map(np.shape, after)


def scattered(composition, values):
    """The arrays `[B, T]` from which `unpack` would take these values of each response; NaN elsewhere."""
    sizes = [batch.loss_weights_BT.size for batch in composition.batches]
    flat = np.full(sum(sizes), np.nan, np.float32)
    flat[composition.cells] = np.concatenate([values[key] for key in composition.keys])
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(b.loss_weights_BT.shape) for part, b in zip(parts, composition.batches, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "cfg"), [("token weights", TOKEN), ("response weights", SEQUENCE)])
def test_a_step_has_the_weights_of_the_formula(case, cfg):
    metrics = trained(case)[0].metrics
    found, groups = expected(cfg), near_policy()[0]
    ratios, weights, lags = joined(found, 0), joined(found, 2), joined(found, 3)
    scale = len(weights) * (weights.mean() if cfg.normalize else 1.0)
    loss = -sum(sample.advantage * found[key_of(sample)][2].sum() for sample in samples_of(groups)) / scale
    want = {
        "loss": loss,
        "ratio": 1.0,
        "importance/ess": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "importance/mean": weights.mean(),
        "staleness/kl": np.mean(ratios - 1 - np.log(ratios)),
        "staleness/variance": ratios.var(),
        "staleness/lag_mean": lags.mean(),
        "staleness/lag_max": lags.max(),
    }
    assert {key: metrics[key] for key in want} == pytest.approx(want, rel=1e-4, abs=TOLERANCE)
    assert 0.0 < metrics["importance/clipped"] < 1.0


def test_a_token_from_the_future_is_refused():
    groups, prepared, _ = near_policy()
    with pytest.raises(ValueError, match=r"version 8 of the weights, which is newer than version 7"):
        compose(groups, prepared, config_for(TOKEN, tokens_per_row=128), version=7)
