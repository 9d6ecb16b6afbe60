"""Computes minibatches on one device, collectively or on demand, in a process of its own: run by `benchmarks/odc.py`,
pinned to a core.

All methods run the same model, loss, attention kernel and layout of a microbatch; they differ in which device computes
which sequences, and in how weights and gradients travel.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from common import Channel, peak_rss_mib
from ulysses_worker import batch_of, local_rows, loss, row_dims, text_model

import models
from benchmarks.packing_baselines import MicrobatchSchedule
from fluxjax.algorithms import sft
from fluxjax.base.process import keep_freed_memory
from fluxjax.base.types import PreparedPrompt, Prompt
from fluxjax.batch.composer import Composer, sft_groups
from fluxjax.config import ODC, STRATEGIES, Config, Remat
from fluxjax.learner.learner import Learner
from models.decoder import logprobs, parameter_count
from models.inputs import ModelInput
from sharding.links import Links, initialize
from sharding.mesh import make_mesh
from sharding.odc.executor import Odc
from sharding.planner.plan import ShardPlan, rounds
from sharding.walk import Fsdp


class Minibatches:
    """Writes the microbatches of schedules into arrays: for all devices together, or for single devices."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def collective(self, schedule: MicrobatchSchedule) -> list[Any]:
        """Returns the batches that all devices compute together: their `m`-th microbatches form one batch; a device
        without one has a token of padding."""
        steps = range(int(schedule.counts().max()))
        return [
            self._batch(
                schedule,
                [microbatches[m] if m < len(microbatches) else () for microbatches in schedule.microbatches],
            )
            for m in steps
        ]

    def alone(self, schedule: MicrobatchSchedule) -> tuple[list[Any], list[int], list[float]]:
        """Returns the batches that single devices compute, the device of each, and the work of each."""
        found = [
            (self._batch(schedule, [microbatch]), device, sum(schedule.work[i] for i in microbatch))
            for device, microbatches in enumerate(schedule.microbatches)
            for microbatch in microbatches
            if microbatch
        ]
        batches, devices, work = zip(*found, strict=True)
        return list(batches), list(devices), list(work)

    def _batch(self, schedule: MicrobatchSchedule, members: Sequence[Sequence[int]]) -> Any:
        order = [(i, device) for device, sequences in enumerate(members) for i in sequences]
        lengths = tuple(schedule.lengths[i] for i, _ in order)
        degrees, firsts = (1,) * len(order), tuple(device for _, device in order)
        work = tuple(schedule.work[i] for i, _ in order)
        plan = ShardPlan(len(members), lengths, work, degrees, firsts, rounds(len(members), degrees, firsts))
        return batch_of(plan, self._vocabulary, [i for i, _ in order])


class Composed:
    """Lays sequences out and computes their gradients with the composer and the learner of a run."""

    def __init__(self, settings: dict, mesh: Any, model: Any, links: Links) -> None:
        self._settings, self._mesh, self._model, self._links = settings, mesh, model, links

    def run(self, strategy: str, room: int, lengths: Sequence[int]) -> Callable[[], Any]:
        """Returns a function that computes (loss, None, gradients) under a strategy. `room` is the number of tokens
        that a device holds."""
        config = self._config(STRATEGIES[strategy](), room)
        prepared = {draw: self._prompt(draw) for draw in range(len(lengths))}
        answers = [
            np.random.default_rng(draw).integers(0, self._settings["model"]["vocab_size"], length - 1).tolist()
            for draw, length in enumerate(lengths)
        ]
        groups = sft_groups([*prepared.values()], answers)
        composer = Composer(config, self._mesh.size, text=self._model.config.text)
        share = composer.outline(groups, prepared).cut(self._links.processes)[self._links.process]
        microbatches = composer.lay_out(share).everywhere

        def gradients() -> Any:
            grads, tally = self._learner.accumulate(microbatches)
            return tally.sums["loss"], None, grads

        return gradients

    @functools.cached_property
    def _learner(self) -> Learner:
        """The learner, one for all strategies: weights have the same layout under each."""
        return Learner(self._config(ODC(), 0), self._model, sft.token_loss, mesh=self._mesh, links=self._links)

    def _config(self, strategy: Any, room: int) -> Config:
        config = Config()
        config.packing.tokens_per_row, config.packing.rows_per_device = room, 1
        config.sharding.strategy = strategy
        if isinstance(strategy, ODC):
            strategy.deterministic = self._settings["deterministic"]
        config.sharding.remat = Remat.LAYER if self._settings["remat"] else Remat.NONE
        return config

    def _prompt(self, draw: int) -> PreparedPrompt:
        """Returns a prompt of one token."""
        inputs = ModelInput(np.zeros(1, np.int32), np.zeros((3, 1), np.int32), np.full(1, -1, np.int32), 1)
        return PreparedPrompt(Prompt(str(draw), "random", "", "", draw=draw), inputs)


def main(settings: dict) -> None:
    os.sched_setaffinity(0, {settings["core"]})  # before JAX starts its threads
    keep_freed_memory()  # as in `fluxjax.train`
    channel = Channel()
    initialize(f"127.0.0.1:{settings['port']}", settings["processes"], settings["process"])
    mesh = make_mesh()
    model = text_model(settings["model"])
    remat = "layer" if settings["remat"] else "none"
    fsdp = Fsdp(mesh, model, forward=logprobs, loss=loss, row_dims=row_dims, remat=remat)
    links = Links()
    odc = Odc(fsdp, links=links, deterministic=settings["deterministic"])
    _, params = models.split(model)
    params = fsdp.shard(params)
    minibatches = Minibatches(settings["model"]["vocab_size"])
    runs: dict[str, Callable[[], Any]] = {}
    step = jax.jit(fsdp.loss_and_grad)
    squares = jax.jit(lambda tree: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
    add = jax.jit(lambda total, more: jax.tree.map(jnp.add, total, more), donate_argnums=0)

    def collective(batches: Sequence[Any]) -> Any:
        total = None
        for batch in batches:
            more = step(params, fsdp.place(local_rows(mesh, batch)))
            total = more if total is None else add(total, more)
        return total

    def alone(batches: Sequence[Any], devices: Sequence[int], work: Sequence[float]) -> Any:
        return odc.loss_and_grad(params, batches, devices, work)

    composed = Composed(settings, mesh, model, links)
    for name, (kind, raw) in settings["runs"].items():
        if kind == "composed":
            runs[name] = composed.run(*raw)
        elif kind == "collective":
            runs[name] = functools.partial(collective, minibatches.collective(_schedule(raw)))
        else:
            runs[name] = functools.partial(alone, *minibatches.alone(_schedule(raw)))
    channel.say(parameters=parameter_count(model))
    for request in channel.requests():
        links.barrier(f"before {request['number']}")
        if request["do"] == "bandwidth":
            channel.say(**bandwidth(mesh, links, request["number"], request["values"], request["repeats"]))
            continue
        started, cpu = time.perf_counter(), time.process_time()
        value, _, grads = jax.block_until_ready(runs[request["run"]]())
        seconds, used = time.perf_counter() - started, time.process_time() - cpu
        channel.say(seconds=seconds, cpu=used, loss=float(value), grad_norm=float(squares(grads)) ** 0.5)
    channel.say(peak_rss_mib=peak_rss_mib())
    links.close()


def bandwidth(mesh: Any, links: Links, number: int, values: int, repeats: int) -> dict[str, Any]:
    """Seconds of an all-gather and a reduce-scatter of `values` floats, and of both operations point to point."""
    device, me = jax.local_devices()[0], links.process
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    shard = jax.device_put(np.full(values // 2, 1.0, np.float32), device)
    whole = jax.make_array_from_single_device_arrays((values,), sharded, [shard])
    many = jax.make_array_from_single_device_arrays(
        (2 * values,), sharded, [jax.device_put(np.ones(values, np.float32), device)]
    )
    spec = jax.sharding.PartitionSpec(mesh.axis_names)

    def mapped(function: Callable) -> Callable:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    gather = mapped(lambda x: jax.lax.all_gather(x, mesh.axis_names, tiled=True))
    scatter = mapped(lambda x: jax.lax.psum_scatter(x, mesh.axis_names, tiled=True))
    join = jax.jit(lambda a, b: jnp.concatenate([a, b]))
    halves = jax.jit(lambda x: tuple(jnp.split(x, 2)))
    add = jax.jit(jnp.add)
    like = [jax.ShapeDtypeStruct((values // 2,), jnp.float32)]
    key = [number << 32]

    def fetch(mine: jax.Array) -> jax.Array:
        """Swaps an array with the other process."""
        key[0] += 1
        links.offer(key[0], [mine])
        (theirs,) = links.fetch(1 - me, key[0], like, device)
        links.ready([theirs])
        return theirs

    def push() -> jax.Array:
        parts = halves(many.addressable_shards[0].data)
        return add(parts[me], fetch(parts[1 - me]))

    operations: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: gather(whole),
        "gather": lambda: join(shard, fetch(shard)),
        "reduce_scatter": lambda: scatter(many),
        "scatter_accumulate": push,
    }
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for repeat in range(repeats + 1):
        for name, run in operations.items():
            links.barrier(f"bandwidth {number} {repeat} {name}")
            began = time.perf_counter()
            jax.block_until_ready(run())
            if repeat:  # the first compiles
                seconds[name].append(time.perf_counter() - began)
    return seconds


def _schedule(raw: dict[str, Any]) -> MicrobatchSchedule:
    return MicrobatchSchedule(**{name: _tuples(value) for name, value in raw.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
