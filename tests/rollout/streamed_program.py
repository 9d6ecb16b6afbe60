"""Compiles one layer of a streamed Qwen2.5-7B for an H100, without one; writes schedules, prints temporaries as JSON.

`JAX_PLATFORMS=cpu python streamed_program.py TARGET.txtpb FOLDER TOKENS:PARTS ...`: for each row length and number of
parts that travel meanwhile, FOLDER/TOKENS-PARTS.hlo. A process of its own, because it needs the CUDA plugin, which
tests on CPUs must not see.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from models.config import DecoderConfig, TextConfig
from rollout.streamed import PARTS
from rollout.streamed_programs import StreamedPrograms
from sharding.mesh import Target, compiling_for
from sharding.walk import HOST_MEMORY

CONFIG = TextConfig(  # Qwen2.5-7B
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
)


class OnHost(SingleDeviceSharding):
    """Host memory of a device that is only described: JAX 0.10 drops the memory kind of such a device's sharding."""

    memory_kind = property(lambda self: HOST_MEMORY)


def main(target, folder, *cases):
    device = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x8", target_config=pathlib.Path(target).read_text()
    ).devices[0]
    programs = StreamedPrograms(DecoderConfig("qwen2", CONFIG))
    memory = {}

    def array(dtype, *shape, place=SingleDeviceSharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place(device))

    for case in cases:
        tokens, parts = map(int, case.split(":"))
        layer = (array(jnp.bfloat16, programs.part_size),) * PARTS
        upcoming = (array(jnp.bfloat16, programs.part_size, place=OnHost),) * parts
        x = array(jnp.bfloat16, 1, tokens, CONFIG.hidden_size)
        rotary = (array(jnp.float32, 1, tokens, CONFIG.head_dim),) * 2
        places = (array(jnp.int32, 1, tokens),) * 2
        with compiling_for(Target.of(device)):
            lowered = programs.prefill.lower(layer, upcoming, x, rotary, (*places, None), room=0, kind="layers")
        compiled = lowered.compile()
        pathlib.Path(folder, f"{tokens}-{parts}.hlo").write_text(compiled.as_text() or "")
        memory[case] = compiled.memory_analysis().temp_size_in_bytes
    print(json.dumps(memory))


if __name__ == "__main__":
    main(*sys.argv[1:])
