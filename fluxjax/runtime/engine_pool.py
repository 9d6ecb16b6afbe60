"""The embedded engines of a process, on a fixed set of devices: the degree decides the number of engines.

The pool deals the first `rollout.engines` x `parallelism.degree` devices of the process to engines, in order. If
`rollout.engines` is 0, there is one engine on CPUs; on accelerators, engines take all devices (at most
`sharding.devices`, if set). At another degree, there are as many engines as the same devices suffice for.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from models.decoder import Decoder
from models.shadow import Fetch
from rollout.engine import SamplingParams
from rollout.jax_engine import JaxEngine

from ..base.event_loop import run_async
from ..base.timeline import Span
from ..batch.composer import Composer
from ..config import AdaptiveAsyncConfig, Config, ConfigError, RolloutEngine
from ..config.bounds import as_config_error
from ..config.learning import MAX_DEGREE

KV_FRACTION = 0.5  # the share of a device's free memory for caches; activations of training need the rest
# Processors that XLA uses up with one compilation. On two processors, the default text run took 28.3 s with programs
# compiled beside the trainer's, 26.1 s without (4 steps, empty cache, two runs each).
FEW_PROCESSORS = 2
SERVER_MEMORY = 0.6  # the share that a colocated SGLang server takes of the memory that is free when it starts

if TYPE_CHECKING:
    from rollout.fleet_server import ServerStatus


def engine_count(config: Config, devices: Sequence[Any], processes: int = 1) -> int:
    """Returns the number of engines of a run in which each process has these devices. If the configuration gives no
    number, there is one engine for each server. Without servers, each process has one engine on CPUs, or as many as its
    accelerators suffice for (at least one)."""
    if config.rollout.engines:
        return config.rollout.engines
    if config.rollout.engine is not RolloutEngine.JAX:
        return config.servers.servers
    if devices[0].platform == "cpu":
        return processes  # all devices of a process are the same cores
    return processes * max(min(len(devices), config.sharding.devices or len(devices)) // config.parallelism.degree, 1)


class EnginePool:
    """The embedded engines. `set_parallelism` changes the list `engines` in place; its first engine stays the same.
    Engines that have a single device may share it; engines that have several devices share none. `model` and `fetch`:
    see `JaxEngine`. `start` compiles programs for `sampling`, the sampling of the run's requests (None: no program).
    Raises `ConfigError` if there are too few devices, or if the devices that engines lend to training could not hold
    the rows of training; also for `adaptive_async` with engines of several devices, and for another model's profile."""

    def __init__(
        self, config: Config, model: Decoder, *, fetch: Fetch | None = None, sampling: SamplingParams | None = None
    ) -> None:
        devices = jax.local_devices()
        parallelism, engines = config.parallelism, engine_count(config, devices)
        wanted = engines * parallelism.degree
        if wanted > len(devices) and (parallelism.degree > 1 or parallelism.enabled):
            raise ConfigError(
                f"rollout.engines ({engines}) x parallelism.degree ({parallelism.degree}) need {wanted} devices, but "
                f"there are {len(devices)}"
            )
        if parallelism.degree > 1 and isinstance(config.policy, AdaptiveAsyncConfig):
            # Two programs may start in different orders on several devices that they share, which would be a deadlock.
            raise ConfigError(
                f"parallelism.degree is {parallelism.degree}, but policy=adaptive_async trains on the devices of its "
                "engines while they generate, which is possible only with engines of one device; set "
                "parallelism.degree to 1"
            )
        self.devices = tuple(devices[number % len(devices)] for number in range(wanted))
        if parallelism.profile:
            _check_profile(parallelism.profile, model)
        if config.stream_trainer:
            check_lent(config, model, self.devices)
        self._config, self._model, self._fetch, self._sampling = config, model, fetch, sampling
        workers = max((os.cpu_count() or 1) - FEW_PROCESSORS, 1)  # the run's own work keeps some processors
        self._background = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self.engines = [self._make(dealt) for dealt in deal(self.devices, parallelism.degree)]

    def _make(self, devices: Sequence[Any]) -> JaxEngine:
        rollout = self._config.rollout
        return JaxEngine(
            self._model,
            slots=rollout.slots,
            max_sequence_tokens=rollout.max_sequence_tokens,
            steps_per_sync=rollout.steps_per_sync,
            kv_tokens=rollout.kv_tokens,
            kept_states=rollout.slots if self._config.data.has_environments else 0,  # one for each waiting episode
            kv_fraction=KV_FRACTION / engines_a_device(self.devices),
            compute_dtype=self._config.model.compute_dtype.value,
            devices=devices,
            fetch=self._fetch,
        )

    def start(self, tell: Callable[[str], None]) -> None:
        """Compiles programs of the engines in threads, while the run goes on; none on `FEW_PROCESSORS` or fewer."""
        rollout, sampling = self._config.rollout, self._sampling
        if sampling is None or (os.cpu_count() or 1) <= FEW_PROCESSORS:
            return
        samples = -(-rollout.prompts_per_step * rollout.group_size // len(self.engines))
        for engine in self.engines:
            engine.compile_ahead(sampling, samples, self._background)

    def close(self) -> None:
        self._background.shutdown(wait=False, cancel_futures=True)
        for engine in self.engines:
            run_async(engine.close())

    def servers(self) -> Sequence[ServerStatus]:
        """Returns no status: there are no servers."""
        return ()

    def lanes(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Returns `spans`, which have the lanes of engines already."""
        return spans

    async def set_parallelism(self, degree: int) -> Sequence[JaxEngine]:
        """Moves the engines to `degree` devices each and wakes them; new engines get the weights of the first engine.
        Surplus engines are closed first, which frees their memory. Raises ValueError if there are too few devices."""
        dealt = deal(self.devices, degree)
        if not dealt:
            raise ValueError(f"{len(self.devices)} devices are too few for an engine of {degree} devices")
        for engine in self.engines[len(dealt) :]:
            await engine.close()
        del self.engines[len(dealt) :]
        for engine, devices in zip(self.engines, dealt, strict=False):
            await engine.set_parallelism(devices)
            await engine.wake()
        for devices in dealt[len(self.engines) :]:
            engine = self._make(devices)
            await engine.copy_weights(self.engines[0])
            self.engines.append(engine)
        return self.engines


def engines_sleep(config: Config, alone: bool, own_policy: bool = False) -> bool:
    """Says whether engines, or servers, give the memory of devices back while the trainer computes on these devices.
    Embedded engines do so if the policy is known to generate nothing meanwhile, unless they belong to several
    processes (not `alone`) or are lent to training. `own_policy`: the user's policy replaces that of `config`."""
    if config.rollout.engine is not RolloutEngine.JAX:
        return config.servers.colocated
    meanwhile = own_policy or config.speculative_sync or isinstance(config.policy, AdaptiveAsyncConfig)
    return alone and not (meanwhile or config.stream_trainer)


def engines_a_device(devices: Sequence[Any]) -> int:
    """Returns the largest number of engines on one device. `devices` has each engine's; shared ones are repeated."""
    return -(-len(devices) // len(set(devices)))


def deal(devices: Sequence[Any], degree: int) -> list[tuple[Any, ...]]:
    """Returns the `degree` devices of each engine; devices too few for a further engine are left out."""
    return [tuple(devices[start : start + degree]) for start in range(0, len(devices) - degree + 1, degree)]


def degrees(config: Config, devices: int) -> list[int]:
    """Returns the degrees that engines may have on `devices` devices."""
    parallelism = config.parallelism
    if not parallelism.enabled:
        return [parallelism.degree]
    most = min(MAX_DEGREE, devices)
    return [1 << power for power in range(most.bit_length()) if parallelism.min_degree <= 1 << power]


def check_lent(config: Config, model: Decoder, devices: Sequence[Any]) -> None:
    """Raises `ConfigError` if the devices of half of the engines, which are lent to training, can't hold the rows of
    training. Checks each degree that may be set."""
    for degree in degrees(config, len(devices)):
        half = len(deal(devices, degree)) // 2
        with as_config_error("stream_trainer: on the devices of half of the engines", ConfigError):
            if half:
                shards = -(-half // engines_a_device(devices)) * degree
                Composer(config, shards, model.config.vision, model.config.text).check()


def _check_profile(file: str, model: Decoder) -> None:
    from rollout.throughput import Profile, ProfileError, sizes

    with as_config_error("parallelism.profile", ProfileError):
        profile = Profile.load(file)
    if profile.model != (here := sizes(model.config.text)):
        differ = ", ".join(f"{name} {profile.model.get(name)}, not {here[name]}" for name in here)
        raise ConfigError(f"parallelism.profile: {file} is of another model: {differ}")
