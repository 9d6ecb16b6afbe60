"""Runs one device of a distributed step in a process of its own: run by `benchmarks/flex_ulysses_step.py`, pinned to
one core.

Every plan runs through the same executor and the same attention kernel: only the plan differs.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from common import Channel, peak_rss_mib
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import models
from benchmarks.plan_text import plan_of
from models.config import DecoderConfig, TextConfig
from models.decoder import Decoder, logprobs, parameter_count
from models.inputs import PackedTokens
from sharding.mesh import make_mesh
from sharding.planner.plan import ShardPlan
from sharding.spread.buffers import SizedLayout, lay
from sharding.spread.shapes import round_up
from sharding.walk import Fsdp, Tally, Walk


def text_model(sizes: dict[str, int]) -> Decoder:
    return models.create(DecoderConfig("qwen2", text=TextConfig(**sizes, tie_word_embeddings=True)), seed=0)


def loss(model: Decoder, inputs: PackedTokens, walk: Walk) -> tuple[jax.Array, Tally]:
    """The sum of the log-probabilities of all tokens but the first of each sequence."""
    logprobs_BT, _ = logprobs(model, inputs, walk)
    counted = jnp.asarray(inputs.positions_3BT)[0] > 0
    total = jnp.sum(jnp.where(counted, logprobs_BT, 0.0))
    return total, Tally({"loss": total}, {})


def row_dims(inputs: PackedTokens) -> object:
    return jax.tree_util.tree_map_with_path(lambda path, _: int(path[-1].name == "positions_3BT"), inputs)


def local_rows(mesh: Mesh, batch: PackedTokens) -> PackedTokens:
    """The rows of a complete batch that this process gives to `Fsdp.place`: those of its own devices."""

    def rows(dim: int, array: np.ndarray) -> np.ndarray:
        sharding = NamedSharding(mesh, P(*[None] * dim, mesh.axis_names))
        places = sharding.addressable_devices_indices_map(array.shape).values()
        found = sorted((place for place in places if place), key=lambda place: place[dim].start or 0)
        return np.concatenate([array[place] for place in found], axis=dim)

    return jax.tree.map(rows, row_dims(batch), batch)


def batch_of(plan: ShardPlan, vocabulary: int, names: Sequence[int] = ()) -> PackedTokens:
    """Lays out random tokens as the plan says. `names[i]`, by default `i`, is the seed of sequence `i`'s tokens."""
    bare = lay(plan)
    lengths = np.array(plan.lengths)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = np.arange(lengths.sum())
    before = np.maximum(index - 1, first)
    needs = bare.needs() | {"exports": sum(round.degree > 1 for round in bare.plan.rounds)}
    layout = SizedLayout(bare, {name: round_up(need) for name, need in needs.items()})
    predecessors, spread = layout.spread(before)
    names = names or range(len(lengths))
    drawn = [np.random.default_rng(name).integers(0, vocabulary, n) for name, n in zip(names, lengths, strict=True)]
    tokens = np.concatenate(drawn) if drawn else np.zeros(0, int)

    def rows(values: np.ndarray, padding: int = 0) -> np.ndarray:
        flat = np.full(plan.num_devices * layout.columns, padding, np.int32)
        flat[layout.cells] = values
        return flat.reshape(plan.num_devices, layout.columns)

    positions = rows(index - first)
    return PackedTokens(
        tokens_BT=rows(tokens),
        segments_BT=rows(np.repeat(np.arange(len(lengths)) + 1, lengths)),
        branches_BT=rows(np.zeros(len(index))),
        positions_3BT=np.stack([positions] * 3),
        predecessor_BT=rows(predecessors),
        feature_index_BT=rows(np.full(len(index), -1), -1),
        vision=None,
        spread=spread,
    )


def main(settings: dict) -> None:
    os.sched_setaffinity(0, {settings["core"]})  # before JAX starts its threads
    channel = Channel()
    jax.distributed.initialize(f"127.0.0.1:{settings['port']}", settings["processes"], settings["process"])
    mesh = make_mesh()
    model = text_model(settings["model"])
    strategy = Fsdp(mesh, model, forward=logprobs, loss=loss, row_dims=row_dims)
    _, params = models.split(model)
    params = strategy.shard(params)
    step = jax.jit(strategy.loss_and_grad)
    plans = {name: plan_of(text) for name, text in settings["plans"].items()}
    batches = {name: batch_of(plan, settings["model"]["vocab_size"]) for name, plan in plans.items()}
    placed = {name: strategy.place(local_rows(mesh, batch)) for name, batch in batches.items()}
    channel.say(parameters=parameter_count(model), rounds={n: b.spread.rounds for n, b in batches.items()})
    for request in channel.requests():
        started = time.perf_counter()
        value, _, _ = jax.block_until_ready(step(params, placed[request["plan"]]))
        channel.say(seconds=time.perf_counter() - started, loss=float(value))
    channel.say(peak_rss_mib=peak_rss_mib())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
