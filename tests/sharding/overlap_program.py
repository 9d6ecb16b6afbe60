"""Compiles a training step of two decoder layers over spread sequences for 8 H100, without one; writes its schedule.

`JAX_PLATFORMS=cpu python overlap_program.py TARGET.txtpb HLO.txt {keep,remat}`: a process of its own, because it needs
the CUDA plugin, which tests on CPUs must not see. The decoder is that of Qwen2.5-7B, in bfloat16, with FSDP.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.config import TextConfig
from models.decoder import DecoderLayer, Mix
from sharding.mesh import Target, binary_axes, compiler_options, compiling_for, make_mesh
from sharding.spread.buffers import Spread
from sharding.spread.ulysses import spread_attention
from sharding.walk import Fsdp, Stack, Tally

LAYERS, TOKENS = 2, 8192
ROUNDS = ((8, 4096), (4, 4096), (2, 2048), (1, 4096))
CONFIG = TextConfig(
    vocab_size=64,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=LAYERS,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
)


class Layers(nnx.Module):
    def __init__(self):
        self.layers = DecoderLayer(CONFIG, stack=LAYERS)


def forward(model, batch, walk):
    spread, segments_BT = batch["spread"], batch["segments_BT"]
    queries = jax.ShapeDtypeStruct((1, TOKENS, CONFIG.num_heads, CONFIG.head_dim), batch["x_BTD"].dtype)
    attend = spread_attention(spread, segments_BT, jnp.zeros_like(segments_BT), tile=512, queries=queries)
    rotary = batch["cos_BTH"], batch["sin_BTH"]

    def step(layer, x, _):
        return layer(x, rotary, Mix(lambda q, k, v: (attend(q, k, v), None)))

    return walk.scan(Stack.of(model.layers), batch["x_BTD"], step)[0]


def loss(model, batch, walk):
    return jnp.sum(forward(model, batch, walk).astype(jnp.float32) ** 2), Tally({}, {})


def main(target, hlo, residuals):
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x8", target_config=pathlib.Path(target).read_text()
    )
    mesh = make_mesh(devices=topology.devices)
    model = Layers()
    fsdp = Fsdp(
        mesh,
        model,
        forward=forward,
        loss=loss,
        row_dims=lambda _: 0,
        compute_dtype=jnp.bfloat16,
        remat="layer" if residuals == "remat" else "none",
    )
    rows = NamedSharding(mesh, P(binary_axes(8)))

    def row(dtype, *shape):
        return jax.ShapeDtypeStruct((8, *shape), dtype, sharding=rows)

    batch = {
        "x_BTD": row(jnp.bfloat16, TOKENS, CONFIG.hidden_size),
        "cos_BTH": row(jnp.float32, TOKENS, CONFIG.head_dim),
        "sin_BTH": row(jnp.float32, TOKENS, CONFIG.head_dim),
        "segments_BT": row(jnp.int32, TOKENS),
        "spread": Spread(
            row(jnp.int32, len(ROUNDS)), row(jnp.int32, len(ROUNDS)), row(jnp.int32, 0), ROUNDS, binary_axes(8)
        ),
    }
    params = jax.tree.map(
        lambda weight, sharding: jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=sharding),
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        fsdp.shardings,
    )
    step = jax.jit(fsdp.loss_and_grad, compiler_options=compiler_options(mesh))
    with compiling_for(Target.of(topology.devices[0])):
        lowered = step.lower(params, batch)
    pathlib.Path(hlo).write_text(lowered.compile().as_text() or "")


if __name__ == "__main__":
    main(*sys.argv[1:])
