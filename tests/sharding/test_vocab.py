"""The chunked vocabulary equals the naive form, in values and gradients, without its memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.vocab import token_logprobs

B, T, D, V = 3, 7, 16, 33


def draw(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
    head = jnp.asarray(rng.normal(size=(V, D)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)


def naive(hidden, head, targets, temperature=1.0, allowed=None):
    logits = jnp.einsum("BTD,VD->BTV", hidden, head, preferred_element_type=jnp.float32)
    logits = logits / jnp.broadcast_to(temperature, targets.shape)[..., None]
    logs = jax.nn.log_softmax(logits if allowed is None else jnp.where(allowed[None, None], logits, -1e30))
    return jnp.take_along_axis(logs, targets[..., None], -1)[..., 0], -jnp.sum(jnp.exp(logs) * logs, -1)


def value_and_grads(function, hidden, head):
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, B, T)), jnp.float32)

    def scalar(hidden, head):
        logprobs, entropies = function(hidden, head)
        return jnp.sum(weights[0] * logprobs + weights[1] * entropies)

    return function(hidden, head), jax.jit(jax.grad(scalar, (0, 1)))(hidden, head)


def both(hidden, head, targets, temperature: Any = 1.0, allowed=None, **options):
    """(values, gradients) of the chunked and of the naive form."""
    options |= {"temperature": temperature, "allowed_V": allowed}
    got = value_and_grads(lambda h, w: token_logprobs(h, w, targets, **options), hidden, head)
    return got, value_and_grads(lambda h, w: naive(h, w, targets, temperature, allowed), hidden, head)


def assert_equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max()), got, want)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 1, 4, 7, 21, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_naive(chunk, temperature):
    assert_equal(*both(*draw(), temperature, chunk=chunk))


@pytest.mark.medium
def test_a_temperature_for_each_token():
    temperatures = jnp.asarray(np.random.default_rng(2).uniform(0.5, 1.5, (B, T)), jnp.float32)
    assert_equal(*both(*draw(), temperatures, chunk=4))


def test_tokens_that_are_never_sampled_are_out_of_the_distribution():
    hidden, head, targets = draw()
    got, want = both(hidden, head, jnp.maximum(targets, 5), 0.6, jnp.arange(V) >= 5, chunk=4)
    assert_equal(got, want)
    assert not np.any(np.asarray(got[1][1])[:5]), "their head weights must get no gradient"


def test_a_target_that_is_never_sampled_is_no_part_of_any_gradient():
    hidden, head, targets = draw()
    got, want = both(hidden, head, targets.at[0, 0].set(2), allowed=jnp.arange(V) >= 5)
    assert_equal(got[1], want[1])


@pytest.mark.medium
def test_bfloat16_accumulates_in_float32():
    hidden, head, targets = draw(jnp.bfloat16)
    (logprobs, entropies), grads = value_and_grads(lambda h, w: token_logprobs(h, w, targets, chunk=4), hidden, head)
    wide = hidden.astype(jnp.float32), head.astype(jnp.float32)
    values, want = value_and_grads(lambda h, w: naive(h, w, targets), *wide)
    assert logprobs.dtype == entropies.dtype == jnp.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2
    for got, expected in zip((logprobs, entropies), values, strict=True):  # same products, same accumulator
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    for got, expected in zip(grads, want, strict=True):  # the gradient of the logits is rounded to bfloat16: 2^-8
        np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0, atol=2**-7 * np.abs(expected).max())


def test_large_logits_stay_finite():
    hidden, head, targets = draw()
    (logprobs, entropies), grads = value_and_grads(lambda h, w: token_logprobs(1e4 * h, w, targets), hidden, head)
    assert all(bool(jnp.isfinite(x).all()) for x in (logprobs, entropies, *grads))


def temp_bytes(function, *arguments):
    memory = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return memory.temp_size_in_bytes


def test_logits_are_never_whole_in_memory():
    tokens, width, vocab, chunk = 1024, 32, 4096, 64
    hidden, head = jnp.zeros((1, tokens, width)), jnp.zeros((vocab, width))
    targets = jnp.zeros((1, tokens), jnp.int32)
    whole = tokens * vocab * 4

    def loss(form):
        return lambda h, w: sum(jnp.sum(part) for part in form(h, w))

    chunked = loss(lambda h, w: token_logprobs(h, w, targets, chunk=chunk))
    plain = loss(lambda h, w: naive(h, w, targets))
    assert temp_bytes(plain, hidden, head) >= whole  # the measure sees whole logits where there are some
    assert temp_bytes(chunked, hidden, head) < whole / 4
    assert temp_bytes(jax.grad(plain, (0, 1)), hidden, head) >= whole
    assert temp_bytes(jax.grad(chunked, (0, 1)), hidden, head) < whole / 4


@pytest.mark.parametrize(
    ("arguments", "message"), [({"chunk": -1}, "chunk"), ({"temperature": 0.0}, "temperature must be positive")]
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        token_logprobs(*draw(), **arguments)
