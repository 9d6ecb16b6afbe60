"""Builds a model of Qwen2.5-1.5B's shape with random weights, sampled on the device, and its training configuration."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

import models
from fluxjax.algorithms import find_algorithm
from fluxjax.base.types import Group, PreparedPrompt, Prompt, Response, Reward, Sample
from fluxjax.batch.composer import Composer
from fluxjax.batch.composition import Microbatch
from fluxjax.config import Config, DType, Remat
from fluxjax.learner.learner import Learner
from models.config import DecoderConfig, TextConfig
from models.decoder import Decoder
from models.inputs import ModelInput
from models.registry import read_config
from sharding.mesh import make_mesh
from sharding.walk import Params
from sharding.weights import WeightSpec, map_weights, on_first_device, shardings

SHAPE = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
         "num_attention_heads": 12, "num_key_value_heads": 2}  # fmt: skip
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16, without sparsity
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second


def sizes(dry: bool) -> DecoderConfig:
    common = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rope_theta": 1e6,
              "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}  # fmt: skip
    return read_config(common | (TINY if dry else SHAPE))


def drawn(model: DecoderConfig, dtype: DTypeLike, places: Callable[[Decoder], Params] = on_first_device) -> Decoder:
    """The model with random weights of this dtype, sampled on the devices that `places` names."""
    abstract = models.abstract(model)

    def draw(path: tuple, variable: nnx.Variable) -> jax.Array:
        spec: WeightSpec = variable.get_metadata("spec")
        if len(spec.shape) == 1 or (not spec.inputs and "V" not in spec.axes):  # a scale or a bias
            return jnp.asarray(spec.init(np.random.default_rng(0), variable.shape), dtype)
        key = jax.random.key(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return model.text.initializer_range * jax.random.normal(key, variable.shape, dtype)

    draw_all = jax.jit(lambda: map_weights(draw, abstract), out_shardings=places(abstract))
    return models.merge(nnx.graphdef(abstract), jax.block_until_ready(draw_all()))


def config(tokens: int, remat: Remat) -> Config:
    """The configuration of training in bfloat16 on one device, with one row of so many tokens a microbatch."""
    found = Config(name="gpu")
    found.model.compute_dtype = DType.BFLOAT16
    found.sharding.devices = found.packing.rows_per_device = 1
    found.rollout.max_sequence_tokens = found.packing.tokens_per_row = tokens
    found.sharding.remat = remat
    found.optim.lr = 1e-6
    return found


def learner(config: Config, model: DecoderConfig) -> Learner:
    mesh = make_mesh(config.sharding.devices)
    places = functools.partial(shardings, mesh=mesh)
    token_loss = find_algorithm(config.algorithm).token_loss
    return Learner(config, drawn(model, np.float32, places), token_loss, mesh=mesh)


def microbatches(config: Config, text: TextConfig, segments: int) -> tuple[Microbatch, ...]:
    """A step of one full row: so many prompts of equal length, each with one response three times as long."""
    rng = np.random.default_rng(0)
    length = config.packing.tokens_per_row // segments
    prompt, response = length // 4, length - length // 4
    groups, prepared = [], {}
    for draw in range(segments):
        about = Prompt(f"random {draw}", "", "", "", draw=draw)
        inputs = text_input(rng.integers(0, text.vocab_size, prompt, dtype=np.int32))
        ids = tuple(rng.integers(0, text.vocab_size, response).tolist())
        logprobs = (-float(np.log(text.vocab_size)),) * response
        sampled = Response(f"{draw}/0", draw, 0, ids, logprobs, (0,) * response, "length", 1.0)
        groups.append(Group(about, (Sample(sampled, Reward(1.0, True), advantage=1.0 if draw % 2 else -1.0),)))
        prepared[draw] = PreparedPrompt(about, inputs)
    return Composer(config, 1, None, text).compose(groups, prepared).everywhere


def text_input(ids: np.ndarray) -> ModelInput:
    """The input of a prompt without media."""
    tokens = len(ids)
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), (3, tokens))
    return ModelInput(ids, positions, np.full(tokens, -1, np.int32), tokens)


def bandwidth() -> float:
    """The bytes a second of the first device's memory, as its maker says; those of an H100 for an unlisted device."""
    kind = jax.devices()[0].device_kind
    return next((speed for name, speed in BANDWIDTHS.items() if name in kind), BANDWIDTHS["H100"])


def memory(device: Any) -> dict[str, float]:
    """GiB of the device: in use now, and the peak so far. Empty if the device does not count them."""
    stats = device.memory_stats() or {}
    names = {"in_use_gib": "bytes_in_use", "peak_gib": "peak_bytes_in_use"}
    return {name: round(stats[field] / 2**30, 2) for name, field in names.items() if field in stats}
