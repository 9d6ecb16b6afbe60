"""Drawing from known logits: frequencies, support, and independence of everything but seed, sample and index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout.programs import _sample_candidates, _sample_sorted, allowed_tokens, sample, sample_keys, stopped
from rollout.slots import SlotSampling, seed_words

LOGITS = np.array([2.0, 1.5, 1.0, 0.7, 0.5, 0.2, 0.0, -0.3, -1.0, -1.5, -2.0, -4.0], np.float32)
V = len(LOGITS)


def params(B, temperature=1.0, top_p=1.0, top_k=0, forbidden=(), seed=0):
    ids = np.full((B, 4), -1, np.int32)
    ids[:, : len(forbidden)] = forbidden
    return SlotSampling(
        np.full(B, temperature, np.float32), np.full(B, top_p, np.float32), np.full(B, top_k, np.int32),
        np.full((B, 4), -1, np.int32), ids, np.full((B, 2), seed_words(seed), np.uint32), np.arange(B, dtype=np.int32),
    )  # fmt: skip


@jax.jit
def draw(logits_BV, settings, index_B):
    keys_B = sample_keys(settings.seed_B2, settings.sample_B)
    return sample(logits_BV, allowed_tokens(settings.forbidden_ids_BI, logits_BV.shape[1]), settings, keys_B, index_B)


def drawn(B=20_000, index=0, logits=LOGITS, **how):
    tokens, logprobs = draw(jnp.tile(logits, (B, 1)), params(B, **how), np.full(B, index, np.int32))
    return np.asarray(tokens), np.asarray(logprobs)


def softmax(x):
    x = np.exp(np.asarray(x, np.float64) - np.max(x))
    return x / x.sum()


def kept(temperature=1.0, top_p=1.0, top_k=0, forbidden=()):
    """The distribution to draw from, by its definition."""
    logits = LOGITS.astype(np.float64) / temperature
    logits[list(forbidden)] = -np.inf
    if top_k:
        logits[np.argsort(-logits, kind="stable")[top_k:]] = -np.inf
    probs = softmax(logits)
    order = np.argsort(-probs, kind="stable")
    needed = int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1 if top_p < 1 else V
    probs[order[needed:]] = 0
    return probs / probs.sum()


def tokens_allowed(how):
    return ~np.isin(np.arange(V), how.get("forbidden", ()))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "forbidden": (0, 3)},
        {"top_k": 4},
        {"top_p": 0.7},
        {"top_p": 0.8, "top_k": 5, "temperature": 1.5, "forbidden": (1,)},
    ],
    ids=str,
)
def test_frequencies_support_and_logprobs(how):
    """Chi-square against the definition, 20,000 draws; limits: 0.999 quantiles for 1 to 11 degrees of freedom."""
    limits = [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59, 31.26]
    tokens, logprobs = drawn(**how)
    expected = kept(**how) * len(tokens)
    counts = np.bincount(tokens, minlength=V)
    assert (counts[expected == 0] == 0).all()
    support = expected > 0
    statistic = ((counts - expected)[support] ** 2 / expected[support]).sum()
    assert statistic < limits[support.sum() - 2]
    # The convention: without forbidden ids, not renormalised for top-k and top-p.
    probs = kept(how.get("temperature", 1.0), forbidden=how.get("forbidden", ()))
    whole = np.log(np.where(tokens_allowed(how), probs, 1.0))
    np.testing.assert_allclose(logprobs, whole[tokens], rtol=0, atol=1e-6)


def test_greedy_takes_the_first_maximum_and_reports_temperature_one():
    logits = LOGITS.copy()
    logits[[2, 5]] = 3.0
    tokens, logprobs = drawn(B=4, logits=logits, temperature=0.0)
    assert set(tokens) == {2}
    np.testing.assert_allclose(logprobs, np.log(softmax(logits))[2], rtol=0, atol=1e-6)
    assert set(drawn(B=4, logits=logits, temperature=0.0, forbidden=(2,))[0]) == {5}


def test_top_k_counts_ties_by_id():
    assert set(drawn(logits=np.zeros(V, np.float32), top_k=3)[0]) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "peaked", "settled"),
    [
        ({"top_k": 20}, False, True),
        ({"top_k": 256, "top_p": 0.6}, False, True),
        ({"top_p": 0.9}, True, True),
        ({"top_p": 0.9}, False, False),  # of a flat distribution, far more tokens than the candidates
        ({"top_k": 257}, True, False),
        ({"top_k": 1}, True, True),
        ({"top_p": 1e-6}, False, True),
    ],
)
def test_a_large_vocabulary_is_sorted_only_where_the_most_probable_tokens_do_not_settle_the_draw(how, peaked, settled):
    """The tokens drawn are the same either way; half of the logits are equal to others."""
    B, size, rng = 64, 3000, np.random.default_rng(1)
    logits = np.round(rng.normal(size=(B, size)) * (4 if peaked else 0.5), 2).astype(np.float32)
    noise, settings = rng.gumbel(size=(B, size)).astype(np.float32), params(B, **how)
    few, known = jax.jit(_sample_candidates)(logits, noise, settings.top_p_B, settings.top_k_B)
    assert set(np.asarray(known)) == {settled}
    whole = jax.jit(_sample_sorted)(logits, noise, settings.top_p_B, settings.top_k_B)
    if settled:
        assert few.tolist() == whole.tolist()
    # and a slot that needs the sort does not change what the others draw
    mixed = jax.tree.map(lambda x, y: np.concatenate([x[:32], y[32:]]), settings, params(B, top_p=0.99))
    index_B = np.zeros(B, np.int32)
    together, alone = (draw(jnp.asarray(logits), each, index_B)[0][:32].tolist() for each in (mixed, settings))
    assert together == alone


def test_mixed_parameters_draw_as_they_would_alone():
    rows = [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}, {"forbidden": (0, 1)}, {"temperature": 1.3}]
    settings = [params(len(rows), seed=3, **how) for how in rows]
    mixed = jax.tree.map(lambda *x: np.stack([each[i] for i, each in enumerate(x)]), *settings)
    index_B = np.arange(len(rows), dtype=np.int32)
    together, _ = draw(jnp.tile(LOGITS, (len(rows), 1)), mixed, index_B)
    alone = [int(draw(jnp.tile(LOGITS, (len(rows), 1)), s, index_B)[0][i]) for i, s in enumerate(settings)]
    assert together.tolist() == alone


def test_draws_of_different_tokens_samples_and_seeds_are_uncorrelated():
    first, _ = drawn(B=4000)
    for redrawn, _ in (drawn(B=4000, index=1), drawn(B=4000, seed=1), drawn(B=4000, seed=1 << 32)):
        agreement = (first == redrawn).mean()
        assert abs(agreement - (softmax(LOGITS) ** 2).sum()) < 0.03  # four standard errors


def test_seeds_beyond_32_bits_and_negative_ones():
    words = {seed_words(seed) for seed in (0, 1, -1, 2**32, 2**32 + 1, 2**63, -(2**63) + 1)}
    assert len(words) == 7


def test_padding_of_id_lists_matches_nothing():
    ids = jnp.array([[-1, -1], [0, -1]], jnp.int32)
    assert np.asarray(allowed_tokens(ids, 3)).tolist() == [[True] * 3, [False, True, True]]
    assert np.asarray(stopped(jnp.array([0, 0]), ids)).tolist() == [False, True]
