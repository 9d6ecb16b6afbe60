"""A run's programs, compiled for devices that this machine may lack, and the bytes that a program allocates and sends.

Arguments are shapes with shardings, so that nothing is allocated. Only the largest shape of each program is compiled.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

import models
from models.config import DecoderConfig
from models.decoder import Decoder
from rollout.lowered import EngineArrays
from rollout.requests import EngineLimits
from rollout.slots import PAGE_TOKENS, pages_for
from sharding.mesh import Target, compiling_for, make_mesh

from ..algorithms import find_algorithm
from ..base.types import TrainBatch
from ..config import ODC, AdaptiveAsyncConfig, AprilConfig, Config, ConfigError, RolloutEngine
from ..learner.critic import Critic
from ..learner.learner import Learner
from ..learner.loss_inputs import shaped
from ..runtime.engine_pool import KV_FRACTION, SERVER_MEMORY, degrees, engine_count
from .account import ENGINE, in_gib
from .largest import largest_batch, prompt
from .schedule import CollectiveTraffic, traffic

# Calls of attention kernels over packed rows or pages, as Mosaic, jax-triton (0.4: `_ffi`) and `mesh.launch` name them.
ATTENTION_CALLS = {
    "mosaic": re.compile(r'custom_call_target="mosaic_gpu\w*".*/hopper_\w+/'),
    "triton": re.compile(r'custom_call_target="triton_kernel_call(?:_ffi)?".*[/(](?:flash|paged)_kernels_\w+\)*/'),
}
UNTILED = "Couldn't find output tile sizes"  # XLA's words in the failure that `Compiled.of` avoids (openxla/xla 36792)
Progress = Callable[[str], None]  # takes the name of the program that is compiled next


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, as one device sees it. Sizes are bytes."""

    temporaries: float
    results: float  # bytes of results that do not replace an argument
    traffic: Mapping[str, CollectiveTraffic]  # by kind of collective
    seconds: float  # seconds of compiling
    offloaded: float  # temporaries in the host's memory
    # names in `ATTENTION_CALLS` of the attention kernels that the program launches; none: its attention is portable JAX
    kernels: frozenset[str] = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(lowered: jax.stages.Lowered) -> Compiled:
        """Compiles a program. If XLA chose a Triton kernel for a matrix product and can't compile it, the program is
        compiled again with products of cuBLAS. Without a GPU, XLA does not try out kernels before it chooses."""
        began = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if UNTILED not in str(error):
                raise
            compiled = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
        memory, seconds = compiled.memory_analysis(), time.perf_counter() - began
        assert memory is not None, "XLA says what a program allocates"
        results, hlo = float(memory.output_size_in_bytes - memory.alias_size_in_bytes), compiled.as_text() or ""
        temporaries, offloaded = float(memory.temp_size_in_bytes), float(memory.host_temp_size_in_bytes)
        kernels = frozenset(name for name, call in ATTENTION_CALLS.items() if call.search(hlo))
        return Compiled(temporaries, results, traffic(hlo), seconds, offloaded, kernels)

    def beyond(self, deeper: Compiled, factor: float) -> Compiled:
        """Extrapolates along the line from `self` (at 0) through `deeper` (at 1) to `factor`; sizes are at least 0."""

        def at(first: float, second: float) -> float:
            return max(first + factor * (second - first), 0.0)

        kinds = {kind: CollectiveTraffic() for kind in {**self.traffic, **deeper.traffic}}
        first, second = (dataclasses.replace(depth, traffic={**kinds, **depth.traffic}) for depth in (self, deeper))
        return dataclasses.replace(jax.tree.map(at, first, second), seconds=self.seconds + deeper.seconds)


@dataclasses.dataclass(frozen=True)
class RunShapes:
    """The arrays that a run of `config` with a model of these sizes keeps on `devices`, as shapes with shardings."""

    config: Config
    model: DecoderConfig
    devices: Sequence[Any]
    learner: Learner
    batch: TrainBatch  # on the mesh
    engine: EngineArrays
    critic: Critic | None = None  # its programs have no logits, and need less memory than the learner's

    @staticmethod
    def of(
        config: Config,
        model: DecoderConfig,
        devices: Sequence[Any],
        never_sampled: tuple[int, ...] | None = None,
        usable: float = math.inf,
    ) -> RunShapes:
        """Returns the shapes of a run. `never_sampled` are tokens that engines never generate; by default the tokens
        that stand for media. `usable` bytes of a device bound its engines' caches, as in the run. Raises ConfigError
        for settings whose programs can't be compiled ahead, for batches and servers without room."""
        if isinstance(config.sharding.strategy, ODC):
            raise ConfigError(
                "sharding.strategy is odc, which makes a program of each layer; the pre-flight does not compile these: "
                "try --config.sharding.strategy=flex_ulysses, which keeps as many weights and tokens on each device"
            )
        if config.sharding.devices not in (0, len(devices)):
            raise ConfigError(f"sharding.devices is {config.sharding.devices}, but the topology has {len(devices)}")
        abstract = models.abstract(model)
        if never_sampled is None:
            never_sampled = (model.image_token_id, model.video_token_id) if model.vision else ()
        algorithm, mesh = find_algorithm(config.algorithm), make_mesh(devices=devices)
        learner = Learner(config, abstract, algorithm.token_loss, mesh=mesh, never_sampled=never_sampled)
        batch = shaped(largest_batch(config, model, len(devices)), config, algorithm)
        batch = learner.gradients.strategy.place(batch)
        servers = config.servers.servers * config.parallelism.degree
        embedded = config.rollout.engine is RolloutEngine.JAX
        # Servers of the smallest degree need the most memory on a device, and start before the first step.
        arrays = engine_arrays(config, abstract, devices, 0 if embedded else degrees(config, servers)[0])
        critic = Critic(config, abstract, mesh=mesh) if algorithm.critic else None
        shapes = RunShapes(config, model, devices, learner, batch, arrays, critic)
        if not shapes.engines_a_device:
            shapes.check_servers(usable)
            return shapes
        room = KV_FRACTION * (usable - sum(shapes.resident().values())) / shapes.engines_a_device
        cache, states = cache_bytes(arrays)
        if not config.rollout.kv_tokens and cache + states > room:
            tokens = int(cache_tokens(config) * max(room - states, 0.0) / cache)
            arrays = engine_arrays(config, abstract, devices, kv_tokens=max(tokens, config.rollout.max_sequence_tokens))
        return dataclasses.replace(shapes, engine=arrays)

    @property
    def engines_a_device(self) -> int:
        """The number of embedded engines that share the fullest device."""
        if self.config.rollout.engine is not RolloutEngine.JAX:
            return 0
        return -(-engine_count(self.config, self.devices) * self.config.parallelism.degree // len(self.devices))

    def servers(self, usable: float) -> float:
        """Returns the bytes of a device that awake colocated servers have, out of `usable` bytes; 0 without any."""
        servers = self.config.servers
        if self.engines_a_device or not servers.colocated:
            return 0.0
        return SERVER_MEMORY * max(usable - sum(self.resident().values()), 0.0)

    def check_servers(self, usable: float) -> None:
        """Raises ConfigError if a colocated server has no room for its weights and one sequence."""
        config, share = self.config, self.servers(usable)
        longest = pages_for(config.rollout.max_sequence_tokens) / self.engine.cache.k_LCKSH.shape[1]
        cache, states = cache_bytes(self.engine)
        needed = bytes_on_device(self.engine.params) + longest * cache + states / config.rollout.slots
        if config.servers.colocated and share < needed:
            raise ConfigError(
                f"servers.colocated: beside training's state, a server has {in_gib(share)} GiB of a device "
                f"({SERVER_MEMORY:.0%}), and needs {in_gib(needed)} for its weights and one sequence; "
                "give servers more devices (parallelism.degree) or training more (they share its state)"
            )

    @property
    def trained(self) -> float:
        """The bytes of the trained weights on the fullest device."""
        return bytes_on_device(self.learner.trained(self.learner.params))

    @property
    def copies(self) -> float:
        """The bytes of a step's cast copies of weights on the fullest device; 0 if master weights are read."""
        gradients, params = self.learner.gradients, self.learner.params
        return bytes_on_device(gradients.copies(params)) if gradients.strategy.copied else 0.0

    def resident(self) -> dict[str, float]:
        """Returns, by kind, the bytes of the arrays that stay on the fullest device through a step, without caches."""
        params, settings, critic = self.learner.params, self.config.algorithm, self.critic
        reference = params if settings.reference else self.learner.trained(params)  # else frozen weights are shared
        return {
            "master weights": bytes_on_device(params),
            "moments": bytes_on_device(self.learner.opt_state),
            "reference weights": bytes_on_device(reference) if settings.kl_coefficient else 0.0,
            "critic weights and moments": 0.0 if critic is None else bytes_on_device((critic.params, critic.opt_state)),
            ENGINE: self.engines_a_device * bytes_on_device(self.engine.params),
        }

    def compiled(self, names: Sequence[str], progress: Progress) -> dict[str, Compiled]:
        """Compiles the programs `names`, which are among `accumulate`, `update`, `logprobs`, `prefill` and `decode`."""
        lowered: dict[str, jax.stages.Lowered] = {}
        with compiling_for(Target.of(self.devices[0])):
            if {"accumulate", "update", "logprobs"} & set(names):
                lowered |= self.learner.lowered(self.batch)
            if {"prefill", "decode"} & set(names):
                lowered |= self.engine.lowered(prompt(self.config, self.model), _begun(self.config))
        found = {}
        for name in names:
            progress(f"compiling {name}, {self.model.text.num_layers} layers")
            found[name] = Compiled.of(lowered[name])
        if (prefill := found.get("prefill")) and "features" in lowered:  # prefill runs after features
            features = Compiled.of(lowered["features"])
            found["prefill"] = dataclasses.replace(
                prefill,
                temporaries=max(prefill.temporaries, features.temporaries),
                results=max(prefill.results, features.results),
                seconds=prefill.seconds + features.seconds,
                kernels=prefill.kernels | features.kernels,
            )
        return found


def compiled_at_depth(
    config: Config,
    model: DecoderConfig,
    devices: Sequence[Any],
    names: Sequence[str],
    few: int,
    progress: Progress,
    never_sampled: tuple[int, ...] | None = None,
) -> tuple[dict[str, Compiled], dict[str, Compiled]]:
    """Returns (the programs of the model with `few` layers, the programs of the model with all layers). Sizes of all
    layers are extrapolated along the line through `few` and twice as many, unless `few` are all."""
    depth = model.text.num_layers
    shallow = model if few == depth else with_layers(model, few)
    first = RunShapes.of(config, shallow, devices, never_sampled).compiled(names, progress)
    if few == depth:
        return first, first
    twice = RunShapes.of(config, with_layers(model, 2 * few), devices, never_sampled).compiled(names, progress)
    return first, {name: first[name].beyond(twice[name], (depth - few) / few) for name in names}


def _begun(config: Config) -> list[int]:
    """Returns the greatest lengths of responses that an engine may have to prefill with their prompts."""
    moved = config.stream_trainer or config.parallelism.enabled
    goes_on = isinstance(config.policy, AprilConfig | AdaptiveAsyncConfig) or moved
    return [config.rollout.max_new_tokens] * config.rollout.group_size if goes_on else []


def cache_tokens(config: Config) -> int:
    """Returns the tokens in the cache of an engine: as configured, or as many as all slots may need."""
    rollout = config.rollout
    return rollout.kv_tokens or EngineLimits(rollout.slots, rollout.max_sequence_tokens, 0).pages * PAGE_TOKENS


def engine_arrays(
    config: Config, model: Decoder, devices: Sequence[Any], degree: int = 0, kv_tokens: int = 0
) -> EngineArrays:
    """Returns the arrays of an engine of `degree` devices with a cache of `kv_tokens`; 0 means as configured."""
    rollout, dtype = config.rollout, config.model.compute_dtype.value
    kept = kv_tokens or rollout.kv_tokens
    pace = EngineLimits.pace(devices[0], rollout.steps_per_sync)
    limits = EngineLimits.of(model.config, rollout.slots, rollout.max_sequence_tokens, kv_tokens=kept, **pace)
    return EngineArrays(model, limits, dtype, devices[: degree or config.parallelism.degree])


def bytes_on_device(tree: PyTree) -> float:
    """Returns the bytes that a device holds of these arrays; the largest share if shares differ."""
    total = 0.0
    for x in jax.tree.leaves(tree):
        shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
        total += float(math.prod(shape)) * x.dtype.itemsize
    return total


def cache_bytes(engine: EngineArrays) -> tuple[float, float]:
    """Returns the bytes on a device of (keys and values, the states of all slots) of an engine."""
    return bytes_on_device((engine.cache.k_LCKSH, engine.cache.v_LCKSH)), bytes_on_device(engine.cache.states)


def with_layers(model: DecoderConfig, layers: int) -> DecoderConfig:
    """Returns the sizes of the model with `layers` decoder layers."""
    return dataclasses.replace(model, text=dataclasses.replace(model.text, num_layers=layers), extra="{}")
