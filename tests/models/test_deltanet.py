"""The layer of Gated DeltaNet equals that of `transformers` in float32: outputs 1e-4, gradients 1e-3 relative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_reference import TOLERANCE, randomise, torch, transformers
from turns import by_turns

from models.deltanet import GatedDeltaNet
from sharding.kernels.delta import DeltaHeads, delta_rule
from sharding.kernels.runs import packed_runs

GRADIENTS = 1e-3  # of the largest value of an array


def both(heads: DeltaHeads, width: int, seed: int):
    """The layer of transformers and ours with its weights. Decays of a token are between 0.5 and 0.999, as trained
    models have them."""
    config = transformers.Qwen3_5TextConfig(
        hidden_size=width,
        linear_num_key_heads=heads.key_heads,
        linear_num_value_heads=heads.value_heads,
        linear_key_head_dim=heads.key_size,
        linear_value_head_dim=heads.value_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    module = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0)
    randomise(module, seed)
    rng = np.random.default_rng(seed)
    rates, steps = rng.uniform(1, 16, heads.value_heads), np.exp(rng.uniform(-7, -3.5, heads.value_heads))
    with torch.no_grad():
        module.A_log.copy_(torch.tensor(np.log(rates)))
        module.dt_bias.copy_(torch.tensor(np.log(np.expm1(steps))))
        module.in_proj_a.weight.mul_(0.3)
    layer = GatedDeltaNet(width, heads, eps=config.rms_norm_eps, std=0.02)
    nnx.update(layer, nnx.State(jax.tree.map(jnp.asarray, ours(module, heads, lambda weight: weight))))
    return module, layer


def ours(module, heads: DeltaHeads, of):
    """`of(weight)` of each weight of the layer of transformers, in our layout."""
    V, J = heads.value_heads, heads.value_size

    def matrix(linear, *outputs: int) -> np.ndarray:
        return of(linear.weight).detach().numpy().T.reshape(-1, *outputs).copy()

    return {
        "qkv": matrix(module.in_proj_qkv, heads.channels),
        "z": matrix(module.in_proj_z, V, J),
        "b": matrix(module.in_proj_b, V),
        "a": matrix(module.in_proj_a, V),
        "conv": of(module.conv1d.weight).detach().numpy()[:, 0].copy(),
        "decay_log": of(module.A_log).detach().numpy().copy(),
        "decay_bias": of(module.dt_bias).detach().numpy().copy(),
        "norm": {"scale": of(module.norm.weight).detach().numpy().copy()},
        "out": matrix(module.out_proj).reshape(V, J, -1),
    }


@pytest.mark.medium
@pytest.mark.parametrize("seed", by_turns(range(3)))
def test_layer_equals_transformers(seed):
    """Two sequences in one packed row, at drawn numbers and sizes of heads."""
    rng = np.random.default_rng(seed)
    key_heads = int(rng.choice([1, 3, 5]))
    heads = DeltaHeads(key_heads, key_heads * int(rng.integers(1, 4)), *map(int, rng.integers(4, 17, 2)))
    width, lengths = int(rng.integers(9, 40)), rng.integers(1, 150, 2)
    module, layer = both(heads, width, seed)
    x = rng.normal(size=(1, lengths.sum(), width)).astype(np.float32)
    weights = rng.normal(size=x.shape).astype(np.float32)

    theirs = torch.tensor(x, requires_grad=True)
    exact = torch.cat([module(part) for part in theirs.split(lengths.tolist(), dim=1)], dim=1)
    (exact * torch.tensor(weights)).sum().backward()

    segments = np.repeat([1, 2], lengths)[None].astype(np.int32)
    runs, (graphdef, params) = packed_runs(segments, 0 * segments), nnx.split(layer)

    @jax.jit
    def run(params, x):
        def loss(params, x):
            out, _ = nnx.merge(graphdef, params)(x, lambda inputs: delta_rule(inputs, heads, runs))
            return jnp.sum(out * weights), out

        (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return out, gradients

    out, (params, dx) = run(params, x)
    assert np.abs(out - exact.detach().numpy()).max() < TOLERANCE
    expected = {**ours(module, heads, lambda weight: weight.grad), "x": theirs.grad.numpy()}
    errors = jax.tree.map(
        lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), {**nnx.to_pure_dict(params), "x": dx}, expected
    )
    assert max(jax.tree.leaves(errors)) < GRADIENTS, errors
    log_decays = -np.exp(module.A_log.detach().numpy()) * np.log1p(np.exp(module.dt_bias.detach().numpy()))
    assert log_decays.max() < -1e-4 and log_decays.min() > -1, "or the test says nothing about states"
