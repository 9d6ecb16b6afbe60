"""The forward pass without a reference: packing, shared prompts, padding, remat, reproducibility."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    logits,
    qwen2_config,
    qwen3_5_config,
    qwen3_config,
    qwen3_vl_config,
    rows,
    run,
    sequence,
    text_config,
    vl_config,
)

import models
from models.config import ModelConfigError
from models.decoder import hidden_states, logprobs
from sharding.walk import Walk

TOLERANCE = 1e-5  # float32, same arithmetic in another order


@pytest.fixture(scope="module")
def vl(request):
    return models.create(getattr(request, "param", vl_config)(), seed=1)


every_kind = pytest.mark.parametrize(
    "vl", [vl_config, qwen3_config, qwen3_vl_config, qwen3_5_config], indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    return [sequence(rng, length, image) for length, image in ((13, True), (9, False), (15, True), (7, False))]


def alone(model, part):
    return np.asarray(run(model, logits, rows([[part]], len(part.tokens), model.config), Walk()))[0]


@pytest.mark.slow
@every_kind
def test_packed_equals_unpacked(vl, sequences) -> None:
    """Two rows of two sequences with images and padding, against each sequence by itself."""
    a, b, c, d = sequences
    packed = np.asarray(run(vl, logits, rows([[a, b], [c, d]], 26, vl.config), Walk()))
    for got, part in ((packed[0, :13], a), (packed[0, 13:22], b), (packed[1, :15], c), (packed[1, 15:22], d)):
        np.testing.assert_allclose(got, alone(vl, part), atol=TOLERANCE, rtol=0)
    assert np.isfinite(packed).all(), "padding is meaningless but finite"


@pytest.mark.slow
@every_kind
def test_shared_prompt_equals_repeated_prompt(vl, sequences) -> None:
    """A prompt once with two responses as branches, against prompt and response twice."""
    prompt = sequences[0]
    rng = np.random.default_rng(3)
    answers = [sequence(rng, length, image=False) for length in (5, 4)]
    packed = rows([[prompt]], 22, vl.config)
    spans = ((13, 18), (18, 22))
    for branch, (answer, (start, stop)) in enumerate(zip(answers, spans, strict=True), start=1):
        packed.tokens_BT[0, start:stop] = answer.tokens
        packed.segments_BT[0, start:stop] = 1
        packed.branches_BT[0, start:stop] = branch
        packed.positions_3BT[:, 0, start:stop] = answer.positions
        packed.predecessor_BT[0, start:stop] = [12, *range(start, stop - 1)]
    shared = np.asarray(run(vl, logprobs, packed, Walk())[0])[0]
    for answer, (start, stop) in zip(answers, spans, strict=True):
        whole = dataclasses.replace(
            prompt,
            tokens=np.concatenate([prompt.tokens, answer.tokens]),
            positions=np.concatenate([prompt.positions, answer.positions], axis=1),
            features=np.concatenate([prompt.features, answer.features]),
        )
        separate = np.asarray(run(vl, logprobs, rows([[whole]], len(whole.tokens), vl.config), Walk())[0])[0]
        np.testing.assert_allclose(shared[start:stop], separate[13:], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(shared[1:13], separate[1:13], atol=TOLERANCE, rtol=0)


@pytest.mark.medium
def test_logprobs_are_those_of_the_predecessors_logits(vl, sequences) -> None:
    inputs = rows([[sequences[2]]], 15, vl.config)
    logs = jax.nn.log_softmax(run(vl, logits, inputs, Walk())[0] / 0.5)
    chosen, entropies = run(vl, logprobs, inputs, Walk(), temperature=0.5)
    wanted = np.asarray(logs)[np.arange(14), inputs.tokens_BT[0, 1:]]
    np.testing.assert_allclose(chosen[0, 1:], wanted, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(entropies[0, 1:], -(np.exp(logs) * logs).sum(-1)[:-1], atol=TOLERANCE, rtol=0)
    assert np.isfinite(chosen).all()
    assert np.isfinite(entropies).all()


@pytest.mark.medium
def test_pixels_matter_and_stay_in_their_segment(vl, sequences) -> None:
    a, b, *_ = sequences
    before = np.asarray(run(vl, logits, rows([[a, b]], 22, vl.config), Walk()))[0]
    upside_down = dataclasses.replace(a, pixels=a.pixels[::-1].copy())
    after = np.asarray(run(vl, logits, rows([[upside_down, b]], 22, vl.config), Walk()))[0]
    assert np.abs(before[2:13] - after[2:13]).max() > 1e-3
    np.testing.assert_array_equal(before[:2], after[:2])
    np.testing.assert_array_equal(before[13:], after[13:])


@pytest.mark.long
def test_gradients_are_finite_with_padding_and_equal_under_remat(vl, sequences) -> None:
    inputs = rows([[sequences[0]], [sequences[1]]], 20, vl.config)  # 7 and 11 tokens of padding
    graphdef, params = models.split(vl)

    def loss(params, walk):
        chosen, _ = logprobs(models.merge(graphdef, params), inputs, walk)
        return jnp.where(inputs.segments_BT > 0, chosen, 0.0).sum()

    plain = jax.jit(jax.grad(loss), static_argnums=1)(params, Walk())
    again = jax.jit(jax.grad(loss), static_argnums=1)(params, Walk(remat="layer"))
    for grad, remat_grad in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert np.isfinite(grad).all()
        assert np.abs(grad).max() > 0, "every weight takes part"
        np.testing.assert_allclose(grad, remat_grad, atol=1e-4, rtol=1e-5)


@pytest.mark.medium
def test_compute_dtype_is_that_of_the_gathered_weights(vl, sequences) -> None:
    """A walk that delivers bfloat16 gives bfloat16 activations; the masters stay float32."""
    walk = Walk(gather=lambda spec, local: local.astype(jnp.bfloat16))
    inputs = rows([[sequences[0]]], 13, vl.config)
    hidden = run(vl, hidden_states, inputs, walk)
    assert hidden.dtype == jnp.bfloat16
    wide = run(vl, hidden_states, inputs, Walk())
    assert wide.dtype == jnp.float32
    error = np.abs(np.asarray(hidden, np.float32) - wide)
    assert error.mean() < 0.05, "bfloat16 keeps two to three digits; activations are of order 1"


def test_text_model_needs_no_pixels_and_refuses_them(vl, sequences) -> None:
    model = models.create(qwen2_config())
    inputs = rows([[sequences[1], sequences[3]]], 16, model.config)
    assert run(model, logits, inputs, Walk()).shape == (1, 16, 64)
    pixels = rows([[sequences[0]]], 13, vl.config).vision
    with pytest.raises(ValueError, match="text model"):
        run(model, logits, dataclasses.replace(inputs, vision=pixels), Walk())


def test_text_model_reads_the_first_position_axis_only(sequences) -> None:
    model = models.create(qwen2_config())
    inputs = rows([[sequences[1]]], 9, model.config)
    moved = dataclasses.replace(inputs, positions_3BT=inputs.positions_3BT + np.asarray([0, 5, 9])[:, None, None])
    np.testing.assert_array_equal(run(model, logits, inputs, Walk()), run(model, logits, moved, Walk()))


def test_create_is_reproducible_from_its_seed() -> None:
    first, again, different = (jax.tree.leaves(models.split(models.create(vl_config(), seed))[1]) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, different, strict=True))


def test_layers_of_a_stack_start_different(vl) -> None:
    weight = np.asarray(vl.layers.attention.q[...])
    assert weight.shape == (2, 48, 6, 8)
    assert not np.array_equal(weight[0], weight[1])
    assert abs(weight.std() / 0.15 - 1) < 0.05


def test_wrong_head_ratio_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="num_key_value_heads=4"):
        text_config(num_kv_heads=4)
