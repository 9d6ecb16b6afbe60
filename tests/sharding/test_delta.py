"""The gated delta rule in chunks equals its definition, a scan over the tokens of each path alone."""

import dataclasses
import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_by_token import delta_by_token
from turns import third_of

from sharding.kernels.delta import (
    DeltaHeads,
    DeltaInputs,
    DeltaState,
    delta_rule,
    delta_step,
    new_state,
)
from sharding.kernels.runs import CHUNK, packed_runs

HEADS = DeltaHeads(key_heads=3, value_heads=6, key_size=8, value_size=5)
B, T, PATHS, LONGEST, CHUNKS = 2, 480, 12, 400, 20
RELATIVE = 1e-5  # of the largest value of an array, float32
BORDERS = [1, 2, 3, 4, 63, 64, 65, 127, 130]

lengths = st.sampled_from(BORDERS) | st.integers(1, 140)
groups = st.tuples(lengths, st.lists(lengths, max_size=4))  # a prompt and its responses


def draw(seed: int, rows: int = B, tokens: int = T) -> DeltaInputs:
    """Inputs whose decays are neither 0 nor 1: a state keeps 0.2 % to 98 % over ten tokens."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    V, X = HEADS.value_heads, HEADS.channels
    log_decay = -np.exp(rng.uniform(np.log(0.002), np.log(0.6), (rows, tokens, V))).astype(np.float32)
    beta = rng.uniform(0.05, 1, (rows, tokens, V)).astype(np.float32)
    return DeltaInputs(*map(jnp.asarray, (normal(rows, tokens, X), log_decay, beta, normal(X, 4))))


def pack(rows: list, rng: np.random.Generator, spaced: bool) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(segments, branches, the cells of each path in the flat rows) of the groups of each row that fit. If `spaced`,
    padding stands in a few places, also within runs."""
    segments, branches = np.zeros((2, B, T), np.int32)
    paths: list[np.ndarray] = []
    for row, groups in enumerate(rows):
        holes = rng.integers(0, T, 3) if spaced else np.zeros(0, int)
        free = np.setdiff1d(np.arange(T), (holes[:, None] + np.arange(9)).reshape(-1))
        for segment, (prompt, responses) in enumerate(groups, 1):
            for branch, length in enumerate([prompt, *responses]):
                if length > len(free) or len(paths) == PATHS:
                    break
                columns, free = free[:length], free[length:]
                segments[row, columns], branches[row, columns] = segment, branch
                if branch == 0:
                    head = row * T + columns
                elif branch == 1:
                    paths.pop()  # the prompt alone
                paths.append(np.concatenate([head, row * T + columns]) if branch else head)
    return segments, branches, paths


def relative(ours: object, exact: object) -> float:
    errors = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)), ours, exact)
    return max(jax.tree.leaves(errors))


@functools.partial(jax.jit, static_argnames="name")
def with_gradients(name: str, inputs: DeltaInputs, weights: jax.Array, index: Any) -> tuple:
    """(outputs, gradients of a weighted sum of them) of packed rows, or of paths by the definition."""

    def rows(inputs: DeltaInputs) -> tuple[jax.Array, jax.Array]:
        out, _ = delta_rule(inputs, HEADS, index, block=4)
        return jnp.sum(out * weights), out

    def alone(inputs: DeltaInputs) -> tuple[jax.Array, jax.Array]:
        def path(x: jax.Array) -> jax.Array:
            x = x.reshape(B * T, -1)
            return jnp.where(index[..., None] >= 0, x[jnp.maximum(index, 0)], 0)

        tokens = DeltaInputs(
            path(inputs.channels_BTX), path(inputs.log_decay_BTV), path(inputs.beta_BTV), inputs.conv_XS
        )
        found, _ = delta_by_token(tokens, HEADS, new_state(HEADS, PATHS, jnp.float32))
        # Every path computes its prompt; the last one is taken.
        out = jnp.zeros((B * T + 1, *found.shape[2:])).at[index].set(found)[:-1].reshape(weights.shape)
        return jnp.sum(out * weights), out

    (_, out), gradients = jax.value_and_grad(rows if name == "rows" else alone, has_aux=True)(inputs)
    return out, gradients


@pytest.mark.slow
@hypothesis.settings(max_examples=third_of(30))
@hypothesis.given(st.lists(st.lists(groups, max_size=3), min_size=B, max_size=B), st.booleans(), st.integers(0, 99))
def test_packed_rows_equal_each_path_alone(rows, spaced, seed):
    """Values, and gradients summed over the responses that share a prompt."""
    segments, branches, paths = pack(rows, np.random.default_rng(seed), spaced)
    index = np.full((PATHS, LONGEST), -1)
    for path, cells in zip(index, paths, strict=False):
        path[: len(cells)] = cells
    inputs = draw(seed)
    weights = jnp.asarray(np.random.default_rng(seed + 1).normal(size=(B, T, 6, 5)), jnp.float32)
    ours = with_gradients("rows", inputs, weights, packed_runs(segments, branches, CHUNKS))
    exact = with_gradients("alone", inputs, weights, jnp.asarray(index))
    assert relative(ours, exact) < RELATIVE
    assert not np.any(np.asarray(ours[0])[segments == 0]), "padding gives zeros"


def test_repeated_keys_lose_no_digits():
    """Where all keys are equal and nothing decays, powers of a chunk's triangular system reach 1e17."""
    inputs = draw(0)
    first = jnp.broadcast_to(inputs.channels_BTX[:, :1], inputs.channels_BTX.shape)
    same = DeltaInputs(first, inputs.log_decay_BTV * 1e-3, inputs.beta_BTV * 0 + 0.99, inputs.conv_XS)
    ours = jax.jit(lambda x, runs: delta_rule(x, HEADS, runs)[0])(same, plain(B, T))
    exact = jax.jit(lambda x: delta_by_token(x, HEADS, new_state(HEADS, B, jnp.float32))[0])(same)
    assert relative(ours, exact) < RELATIVE


def plain(rows: int, tokens: int, *, given: bool = False):
    return packed_runs(np.ones((rows, tokens), np.int32), np.zeros((rows, tokens), np.int32), given=given)


def cut(inputs: DeltaInputs, start: int, stop: int) -> DeltaInputs:
    x, log_decay, beta = (x[:, start:stop] for x in (inputs.channels_BTX, inputs.log_decay_BTV, inputs.beta_BTV))
    return DeltaInputs(x, log_decay, beta, inputs.conv_XS)


@pytest.mark.medium
@pytest.mark.parametrize("at", [2, CHUNK, CHUNK + 1])
def test_a_sequence_goes_on_from_the_state_behind_its_first_part_and_token_by_token(at):
    """As an engine does with a prompt in two parts and a response."""
    end, total = at + 70, at + 75
    inputs = draw(1, 2, total)
    exact, last = jax.jit(lambda x: delta_by_token(x, HEADS, new_state(HEADS, 2, jnp.float32)))(inputs)
    prefill = jax.jit(lambda x, runs, state: delta_rule(x, HEADS, runs, state))
    first, state = prefill(cut(inputs, 0, at), plain(2, at), None)
    second, state = prefill(cut(inputs, at, end), plain(2, end - at, given=True), state)
    parts, step = [first, second], jax.jit(lambda x, state: delta_step(x, HEADS, state))
    for token in range(end, total):
        out, state = step(cut(inputs, token, token + 1), state)
        parts.append(out)
    assert relative((jnp.concatenate(parts, axis=1), state), (exact, last)) < RELATIVE


def test_states_of_rows_of_different_lengths():
    """Padding behind a row changes no state, and rows without tokens keep the given one."""
    inputs, tokens = draw(2, 3, 100), (0, 1, 70)
    segments = (np.arange(100) < np.array(tokens)[:, None]).astype(np.int32)
    rng = np.random.default_rng(3)
    given = DeltaState(
        jnp.asarray(rng.normal(size=(3, 6, 8, 5)), jnp.float32),
        jnp.asarray(rng.normal(size=(3, 3, HEADS.channels)), jnp.float32),
    )
    _, ours = jax.jit(lambda *x: delta_rule(x[0], HEADS, *x[1:]))(
        inputs, packed_runs(segments, 0 * segments, given=True), given
    )
    for row, length in enumerate(tokens):
        here = functools.partial(jax.tree.map, lambda x, row=row: x[row : row + 1])
        alone = here(given)
        if length:
            part = dataclasses.replace(here(inputs), conv_XS=inputs.conv_XS)
            _, alone = delta_by_token(cut(part, 0, length), HEADS, alone)
        assert relative(here(ours), alone) < RELATIVE


def test_refuses():
    segments = np.ones((1, 130), np.int32)
    with pytest.raises(ValueError, match="3 chunks of 64 tokens, more than the 2"):
        packed_runs(segments, 0 * segments, 2)
    with pytest.raises(ValueError, match="branch 1 of segment 1 begins before its prompt ends"):
        packed_runs(segments, (np.arange(130) < 3)[None].astype(np.int32))
    with pytest.raises(ValueError, match="5 value heads must be a multiple of 2 key heads"):
        DeltaHeads(2, 5, 8, 8)
