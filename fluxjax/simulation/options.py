"""The configuration of `python -m fluxjax.simulate`: the sections of a run, and a section for the cluster.

A simulation reads only the sections that schedule work. The other sections, which say how tokens are computed, must
keep their defaults: another value is refused, because it would have no effect.
"""

import dataclasses
import enum
import operator
from typing import ClassVar

from ..config import Config, ConfigError
from ..config.bounds import Section, check_fields, not_negative, positive, within
from ..config.learning import MAX_DEGREE
from .faults import FaultRates
from .hardware import HARDWARE, LONGEST_PROMPT, TASKS, Hardware


class Model(enum.Enum):
    """The model that runs on the GPUs: a key of `hardware.HARDWARE`."""

    QWEN_7B = "7b"
    QWEN_14B = "14b"
    QWEN_32B = "32b"


class Rewards(enum.Enum):
    """The scheduling of rewards: when, with which time-outs, on which GPUs (Flexes, section 4.3)."""

    SYNCHRONOUS = "synchronous"  # after all generation, as in verl
    ASYNCHRONOUS = "asynchronous"  # each response as it ends
    SCHEDULED = "scheduled"  # each response as it ends; adaptive time-outs of sandboxes, judges on the engines' GPUs


@dataclasses.dataclass(slots=True)
class SimulationConfig(Section):
    model: Model = Model.QWEN_14B  # 7b, 14b or 32b: Qwen2.5
    gpus: int = positive(32)  # all GPUs of the cluster
    train_gpus: int = not_negative(0)  # GPUs for training alone; 0: engines and trainer share all GPUs, in turn
    degree: int = positive(2)  # GPUs of an engine
    max_running: int = positive(256)  # samples that an engine decodes at once
    speed: float = positive(1.0)  # speed of every GPU in compute and memory, relative to an H800
    memory_fraction: float = within(0.6, "[0, 1]")  # share of a GPU's memory for rollout, weights included
    median: float = positive(550.0)  # tokens of a response
    spread: float = not_negative(1.05)  # standard deviation of the logarithm of a response's length
    shared: float = within(0.5, "[0, 1]")  # share of the logarithm's variance that depends on the prompt
    tasks: tuple[str, ...] = TASKS  # a subset of math, code, judge, which are equally probable for a prompt
    prompts: int = positive(10_240)  # prompts in the data set
    epochs: int = not_negative(0)  # times that the data set is drawn; 0: no bound
    turns: int = positive(1)  # the most turns of a response, each answered by an environment; 1: no environment
    environment_seconds: float = not_negative(5.0)  # mean seconds of an environment's answer
    observation_tokens: int = positive(100)  # tokens of an environment's answer
    rewards: Rewards = Rewards.ASYNCHRONOUS  # synchronous: as verl; scheduled: as Flexes
    rules: int = positive(1)  # math rewards that are computed at once
    sandboxes: int = positive(512)  # code rewards that are computed at once
    judges: int = positive(8)  # judges, on GPUs of their own; scheduled: one on each of `gpus`
    reward_limit: float = positive(30.0)  # seconds until a missing reward counts as 0
    reply_limit: float = positive(300.0)  # seconds until a missing response counts as lost
    recompute: bool = True  # caches of running responses are computed anew for new weights
    drift: float = not_negative(0.1)  # standard deviation of a token's log-ratio between two versions of the weights
    evaluation_seconds: float = not_negative(0.0)
    checkpoint_seconds: float = not_negative(0.0)
    faults: FaultRates = dataclasses.field(default_factory=FaultRates)

    def hardware(self) -> Hardware:
        known = HARDWARE[self.model.value]
        return dataclasses.replace(known, scale=self.speed, memory_fraction=self.memory_fraction)

    @property
    def rollout_gpus(self) -> int:
        return self.gpus - self.train_gpus

    @property
    def engines(self) -> int:
        return self.rollout_gpus // self.degree


@dataclasses.dataclass(slots=True)
class SimulateConfig(Config):
    """A run's configuration with a cluster. `unread` are the sections and fields that a simulation does not read."""

    simulation: SimulationConfig = dataclasses.field(default_factory=SimulationConfig)
    unread: ClassVar[tuple[str, ...]] = (
        *("name", "run_dir", "model", "data", "rewards", "warm_start", "algorithm", "replay", "critic", "optim"),
        *("lora", "sharding", "packing", "report"),
        *("rollout.slots", "rollout.max_sequence_tokens", "rollout.kv_tokens", "rollout.steps_per_sync"),
        *("evaluation.samples", "checkpoint.keep"),
    )

    def validate(self) -> None:
        """Sets `rollout.engines` and `parallelism.degree` from the cluster. Raises `ConfigError`, naming the field and
        the fix, for an impossible cluster and for a changed field without effect."""
        default = type(self)()
        check_fields(self)
        for field in self.unread:
            read = operator.attrgetter(field)
            if read(self) != read(default):
                raise ConfigError(f"{field} was set, but nothing of a simulation depends on it; leave it out")
        if not self.rollout.tempered and self.rollout.temperature != default.rollout.temperature:
            raise ConfigError("rollout.temperature was set, but nothing of a simulation depends on it; leave it out")
        self._validate_cluster()
        if self.rollout.engines not in (default.rollout.engines, self.simulation.engines):
            raise ConfigError(
                f"rollout.engines is {self.rollout.engines}; leave it out: simulation.gpus and simulation.degree make "
                f"{self.simulation.engines} engines"
            )
        if self.parallelism.degree not in (default.parallelism.degree, self.simulation.degree):
            raise ConfigError(
                f"parallelism.degree is {self.parallelism.degree}; leave it out: simulation.degree sets it"
            )
        self.rollout.engines, self.parallelism.degree = self.simulation.engines, self.simulation.degree
        self.validate_scheduling()

    def _validate_cluster(self) -> None:
        sim = self.simulation
        if not sim.tasks or set(sim.tasks) - set(TASKS) or len(set(sim.tasks)) < len(sim.tasks):
            raise ConfigError(f"simulation.tasks is {sim.tasks}; it must have some of {', '.join(TASKS)}, each once")
        if sim.train_gpus >= sim.gpus:
            raise ConfigError(f"simulation.train_gpus is {sim.train_gpus} of {sim.gpus} gpus; none is left for engines")
        hardware = sim.hardware()
        if sim.rollout_gpus % sim.degree or hardware.gpus_per_host % sim.degree:
            raise ConfigError(
                f"simulation.degree is {sim.degree}; it must divide the {hardware.gpus_per_host} GPUs of a host and "
                f"the {sim.rollout_gpus} GPUs for rollout"
            )
        self._validate_memory(hardware, sim.degree)
        if self.parallelism.enabled:
            self._validate_memory(hardware, self.parallelism.min_degree)
            most = min(MAX_DEGREE, hardware.gpus_per_host, sim.rollout_gpus)
            if sim.rollout_gpus % (1 << (most.bit_length() - 1)):
                raise ConfigError(
                    f"with parallelism.min_degree above 0, engines have up to {most} GPUs, which must divide the "
                    f"{sim.rollout_gpus} for rollout"
                )
        if (chance := sim.faults.lost + sim.faults.doubled + sim.faults.late) > 1:
            raise ConfigError(f"simulation.faults.lost + doubled + late is {chance:g}; it must be at most 1")

    def _validate_memory(self, hardware: Hardware, degree: int) -> None:
        longest = self.rollout.max_new_tokens + LONGEST_PROMPT
        name = "simulation.degree" if degree == self.simulation.degree else "parallelism.min_degree"
        try:
            room = hardware.kv_limit(degree)
        except ValueError as error:
            raise ConfigError(f"{name} is {degree}; {error}") from None
        if longest > room:
            raise ConfigError(
                f"rollout.max_new_tokens is {self.rollout.max_new_tokens}; with its prompt, a response may have "
                f"{longest} tokens, but the cache of an engine of {degree} GPUs holds {room}"
            )
