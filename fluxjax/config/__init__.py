"""The typed configuration, which `configs/*.py` build, flags override and `validate()` checks.

Each field declares its bound (`fluxjax.config.bounds`) and the comment that `--help` shows. This package imports
nothing heavy, so that `--help` and errors are printed at once. Sections are mutable, since flags set fields after
construction. A trainer makes a copy of its own, which refuses assignments. Sections have slots, so that a configuration
file cannot set a field that does not exist.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import ClassVar

from ..base.errors import ConfigError
from .bounds import (
    Chosen,
    Section,
    bounded,
    check_fields,
    choice,
    is_port,
    not_negative,
    pair,
    positive,
    power_of_two,
    scheduled,
    within,
)
from .data import DataConfig, RewardsConfig
from .data import RewardKindConfig as RewardKindConfig
from .data import RewardTerm as RewardTerm
from .data import SourceConfig as SourceConfig
from .learning import OWN_SETTINGS as OWN_SETTINGS
from .learning import AdaptiveAsyncConfig as AdaptiveAsyncConfig
from .learning import (
    AlgorithmConfig,
    DynamicSampling,
    LoraConfig,
    ParallelismConfig,
    Policy,
    ReplayConfig,
    SynchronousConfig,
    TailBatchingConfig,
)
from .learning import AprilConfig as AprilConfig
from .learning import CriticConfig as CriticConfig
from .learning import Importance as Importance
from .learning import ImportanceConfig as ImportanceConfig
from .learning import ImportanceLevel as ImportanceLevel
from .learning import KlEstimator as KlEstimator
from .learning import LossAggregation as LossAggregation
from .schedules import make_schedules, rate_schedule
from .servers import RolloutEngine, Route, ServersConfig, WeightsConfig


@dataclasses.dataclass(slots=True)
class FSDP(Chosen):
    """Every device computes complete sequences."""

    spreads: ClassVar[bool] = False  # True if several devices may compute a sequence together


@dataclasses.dataclass(slots=True)
class Ulysses(Chosen):
    """Every sequence is spread over the same number of devices."""

    spreads: ClassVar[bool] = True
    max_degree: int = power_of_two(0)  # the most devices for one sequence; 0: as many as devices and heads allow


@dataclasses.dataclass(slots=True)
class FlexUlysses(Ulysses):
    """Each sequence is spread over as many devices as balance needs."""


@dataclasses.dataclass(slots=True)
class ODC(Ulysses):
    """Each device computes sequences at its own pace. Sequences too long for one device are spread, and come first."""

    # True: parameters and gradients are spread over devices_per_host devices, and optimizer state over all devices.
    hybrid: bool = False
    # True: gradients add up in an order that the plan fixes, always with the same bits. False: as they arrive.
    deterministic: bool = False


Strategy = FSDP | Ulysses | FlexUlysses | ODC


class DType(enum.Enum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Remat(enum.Enum):
    NONE = "none"
    DOTS = "dots"  # the backward pass keeps a layer's input and products with weights, and computes the rest again
    LAYER = "layer"  # the backward pass keeps a layer's input
    OFFLOAD = "offload"  # the backward pass keeps a layer's input in the host's memory
    AUTO = "auto"  # memory unknown or no pre-flight: `none`; else odc: `layer`; else the first of these that fits


class Schedule(enum.Enum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


# Architecture and sizes of the tiny model. In a tiny Qwen3-VL, the decoder reads every layer of the tower.
TINY: Mapping[str, object] = {
    "architecture": "qwen2_5_vl",  # or qwen3_vl, qwen3_5; for text alone: qwen2, qwen3, qwen3_5_text
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "tie_word_embeddings": False,
    "rope_theta": 30.0,  # sequences have a few dozen tokens
    "mrope_section": (2, 3, 3),  # frequencies of each position axis (time, height, width)
    "initializer_range": 0.1,
    "vision_hidden_size": 64,
    "vision_intermediate_size": 128,
    "vision_depth": 2,
    "vision_num_heads": 4,
    "vision_full_attention_layers": (1,),
    "patch_size": 8,
    "window_size": 16,  # pixels
}


@dataclasses.dataclass(slots=True)
class ModelConfig(Section):
    path: str = ""  # a local Hugging Face checkpoint folder; empty: the tiny model below, with random weights
    # The architecture and the sizes of the tiny model, by the names of `fluxjax.config.TINY`.
    tiny: dict[str, object] = dataclasses.field(default_factory=lambda: dict(TINY))
    compute_dtype: DType = DType.FLOAT32  # type of the computation; master weights stay float32


@dataclasses.dataclass(slots=True)
class WarmStartConfig(Section):
    """Supervised steps before RL, so that the policy answers in the right form."""

    steps: int = not_negative(0)  # 0: no warm start
    batch_size: int = positive(64)  # records of a step
    lr: float | str = scheduled(2e-3, "[0, 1]")  # the learning rate, or its schedule


@dataclasses.dataclass(slots=True)
class RolloutConfig(Section):
    engine: RolloutEngine = RolloutEngine.JAX  # kind of the engines that generate responses
    prompts_per_step: int = positive(32)  # prompts of a training step
    group_size: int = positive(8)  # responses to each prompt
    max_new_tokens: int = positive(16)  # the most tokens of a response
    # A number, or a schedule, which may differ between sources and prompts.
    temperature: float | str = scheduled(
        1.0,
        "[1e-6, inf)",
        "greedy responses to a prompt are all the same and teach nothing (evaluations are greedy at any "
        "rollout.temperature)",
    )
    slots: int = positive(256)  # samples decoded at once by an engine
    max_sequence_tokens: int = positive(128)  # prompt plus response
    # Tokens in the KV cache of each engine, shared by its slots. 0: a server takes what its memory allows; an embedded
    # engine takes what all slots may need, within half of the free device memory (on CPUs within 4 GiB).
    kv_tokens: int = not_negative(0)
    # Tokens that an embedded engine decodes for each sample in a round. 0: 4 on CPUs (up to 16 for a small model
    # without stop ids); on other devices 4 while samples wait or are near their limit, otherwise up to 64.
    steps_per_sync: int = not_negative(0)
    # The number of embedded engines. Each engine has its own devices if the host has enough. 0: an engine for every
    # parallelism.degree accelerators of the host; one engine on a CPU.
    engines: int = not_negative(0)
    # Other prompts replace a group whose responses all have the same reward, in its field `correct` or `value` (DAPO).
    dynamic_sampling: DynamicSampling = DynamicSampling.OFF
    # The most prompts that are drawn for a step, in multiples of prompts_per_step. 0: no bound.
    max_num_gen_batches: int = not_negative(10)

    @property
    def tempered(self) -> bool:
        """Returns True if the temperature follows a schedule."""
        return isinstance(self.temperature, str)

    @property
    def fixed_temperature(self) -> float:
        """The temperature if it is a number; 1 if it is a schedule."""
        return 1.0 if isinstance(self.temperature, str) else self.temperature


@dataclasses.dataclass(slots=True)
class OptimConfig(Section):
    lr: float | str = scheduled(1e-3, "[0, 1]")  # the learning rate after its warmup, or its schedule from there on
    schedule: Schedule = Schedule.CONSTANT  # course of the learning rate over the run
    warmup_steps: int = not_negative(0)  # steps in which the learning rate rises from 0
    betas: tuple[float, float] = pair((0.9, 0.99), "[0, 1)", "[0, 1)")  # decay of Adam's first and second moment
    eps: float = positive(1e-8)  # Adam's epsilon, added to the root of the second moment
    weight_decay: float = not_negative(0.0)  # for matrices and embeddings, not for norms and biases
    max_grad_norm: float = not_negative(1.0)  # gradients are clipped to this global norm; 0: no clipping
    moments_dtype: DType = DType.FLOAT32  # type of Adam's stored moments; moments are computed in float32


@dataclasses.dataclass(slots=True)
class ShardingConfig(Section):
    strategy: Strategy = choice(FSDP, Ulysses, FlexUlysses, ODC)  # noqa: RUF009
    devices: int = not_negative(0)  # devices that train; 0: all that JAX sees
    remat: Remat = Remat.NONE  # offload is not possible under odc
    preflight: bool = True  # on GPUs, a run first compiles its largest programs, and ends if they do not fit in memory
    device_memory_gib: float = not_negative(0.0)  # memory of a device; 0: what JAX may use of a GPU, no check on CPUs
    devices_per_host: int = positive(8)  # flex_ulysses: sequences stay within a host if they fit; odc: see hybrid
    calibration: str = ""  # file of `python benchmarks/calibrate.py`; empty: flex_ulysses takes length**2, odc FLOPs
    # A new shape compiles in the background, and is used after this many steps. 0: it compiles when it is first used.
    # Must be 0 under odc.
    compile_ahead: int = not_negative(0)


@dataclasses.dataclass(slots=True)
class PackingConfig(Section):
    # Tokens of a row. Under fsdp, a value of 1024 or more is a bound: rows are shorter if shorter rows save padding.
    tokens_per_row: int = positive(256)
    # fsdp: the most rows of a device in a microbatch. Other strategies: one row, of as many tokens as these rows have.
    rows_per_device: int = positive(16)
    patches_per_device: int = positive(4096)  # the most patches of a device in a microbatch
    share_prompts: bool = True  # compute a group's prompt once for all its responses


@dataclasses.dataclass(slots=True)
class CheckpointConfig(Section):
    every: int = not_negative(50)  # steps; 0: only at the end
    keep: int = positive(2)  # number of the newest checkpoints that are kept


@dataclasses.dataclass(slots=True)
class EvaluationConfig(Section):
    every: int = not_negative(50)  # steps; 0: only at start and end
    samples: int = positive(200)  # held-out prompts of each source, at the start and the end


@dataclasses.dataclass(slots=True)
class ReportConfig(Section):
    # The port to serve metrics on, or host:port; empty: none. A host beyond loopback needs FLUXJAX_TOKEN, which
    # scrapers send as their credentials.
    prometheus: str = bounded("", is_port, "be a port, or host:port")
    dump_samples_every: int = not_negative(20)  # steps between two dumps of responses; 0: never

    @property
    def prometheus_address(self) -> tuple[str, int]:
        """The host and the port to serve metrics on; the port is 0 if metrics are not served."""
        host, _, port = self.prometheus.rpartition(":")
        return host.strip("[]") or "127.0.0.1", int(port or 0)


@dataclasses.dataclass(slots=True)
class DistributedConfig(Section):
    """Several trainer processes, one a host. Processes of Slurm and Open MPI find each other; elsewhere, set the first
    three fields. `python -m fluxjax.launch` starts the processes on one machine."""

    coordinator: str = ""  # host:port of process 0
    processes: int = not_negative(0)  # 0: as many as Slurm has tasks or Open MPI has ranks, else one
    process: int = not_negative(0)  # number of this process, from 0
    # Seconds that a process may take for a step or a checkpoint before all processes end; compiling does not count. At
    # the start, processes wait for each other for the same time, but at most five minutes.
    progress_timeout: float = positive(900.0)


@dataclasses.dataclass(slots=True)
class Config(Section):
    """All settings of a run. A subclass lists in `unread` the sections and fields that its command never reads."""

    unread: ClassVar[tuple[str, ...]] = ()
    # The name of the run.
    name: str = bounded("vlm", lambda value: value != "" and "/" not in value, "be a folder's name, without '/'")
    seed: int = bounded(0, lambda value: 0 <= value < 2**31, "be in [0, 2**31)")  # seed of random numbers and draws
    steps: int = positive(300)  # training steps of RL
    run_dir: str = ""  # empty: runs/<name>-<date>; an existing run is resumed
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rewards: RewardsConfig = dataclasses.field(default_factory=RewardsConfig)
    warm_start: WarmStartConfig = dataclasses.field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    servers: ServersConfig = dataclasses.field(default_factory=ServersConfig)
    weights: WeightsConfig = dataclasses.field(default_factory=WeightsConfig)
    policy: Policy = choice(SynchronousConfig, TailBatchingConfig, AprilConfig, AdaptiveAsyncConfig)  # noqa: RUF009
    # Devices of half of the engines compute gradients of complete groups while other engines generate (Flexes, 4.4).
    stream_trainer: bool = False
    # Training of a step begins early if its incomplete groups are predicted to end while gradients of complete groups
    # are computed (Flux, insight 2). The value is the least confidence of the prediction. 0: training waits for all
    # groups.
    speculative_sync: float = within(0.0, "[0, 1)")
    parallelism: ParallelismConfig = dataclasses.field(default_factory=ParallelismConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    replay: ReplayConfig = dataclasses.field(default_factory=ReplayConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    packing: PackingConfig = dataclasses.field(default_factory=PackingConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    report: ReportConfig = dataclasses.field(default_factory=ReportConfig)

    def validate(self) -> None:
        """Raises `ConfigError` for settings that cannot work, naming the field, its value and the fix."""
        check_fields(self)
        self.validate_scheduling()
        self._validate_servers()
        self.algorithm.validate()
        if self.rollout.group_size < 2 and self.algorithm.relative:
            raise ConfigError(
                f"rollout.group_size is 1; {self.algorithm.name} compares responses of one prompt and needs at least 2"
            )
        if self.algorithm.minibatches > self.rollout.prompts_per_step:
            raise ConfigError(
                f"algorithm.minibatches is {self.algorithm.minibatches}, but the responses of a prompt stay together "
                f"and a step has {self.rollout.prompts_per_step} prompts (rollout.prompts_per_step)"
            )
        if self.critic.warmup_steps >= self.steps:
            raise ConfigError(
                f"critic.warmup_steps is {self.critic.warmup_steps}, and the run has {self.steps} steps: the policy "
                "would never be trained"
            )
        longest, row = self.rollout.max_sequence_tokens, self.packing.tokens_per_row
        if self.rollout.max_new_tokens >= longest:
            raise ConfigError(
                f"rollout.max_new_tokens ({self.rollout.max_new_tokens}) leaves no room for a prompt in "
                f"rollout.max_sequence_tokens ({longest})"
            )
        if 0 < self.rollout.kv_tokens < longest:
            raise ConfigError(
                f"rollout.kv_tokens ({self.rollout.kv_tokens}) holds no sequence of rollout.max_sequence_tokens "
                f"({longest})"
            )
        if isinstance(self.sharding.strategy, FSDP) and row < longest:
            raise ConfigError(
                f"packing.tokens_per_row ({row}) is shorter than rollout.max_sequence_tokens ({longest}); the longest "
                "response would not fit"
            )
        if self.optim.moments_dtype is DType.BFLOAT16 and self.optim.betas[1] > 1 - 2**-7:
            raise ConfigError(
                f"optim.moments_dtype is bfloat16, whose 8 bits lose what optim.betas[1] = {self.optim.betas[1]} adds "
                "to the second moment in a step; lower optim.betas[1] to 0.99"
            )
        if self.sharding.compile_ahead and isinstance(self.sharding.strategy, ODC):
            raise ConfigError(
                f"sharding.compile_ahead={self.sharding.compile_ahead} is not possible under sharding.strategy=odc, "
                "where each device compiles stages of its own; set it to 0"
            )
        if self.sharding.remat is Remat.OFFLOAD and isinstance(self.sharding.strategy, ODC):
            raise ConfigError(
                "sharding.remat is offload, which sharding.strategy=odc does not support; set sharding.remat to layer"
            )
        distributed = self.distributed
        if distributed.process >= max(distributed.processes, 1):
            raise ConfigError(
                f"distributed.process is {distributed.process}; it must be below distributed.processes "
                f"({distributed.processes})"
            )
        if distributed.processes > 1 and not re.fullmatch(r".+:\d+", distributed.coordinator):
            raise ConfigError(
                f"distributed.coordinator is {distributed.coordinator!r}; with "
                f"distributed.processes={distributed.processes} it must be the host:port of process 0"
            )
        if not self.data.sources:
            raise ConfigError("data.sources is empty; name at least one source in the configuration file")
        for name, source in self.data.sources.items():
            source.validate_rewards(f"data.sources.{name}")

    def policy_updates(self, steps: int) -> int:
        """Returns the number of the policy's optimizer steps in a run of `steps` training steps of RL."""
        return (steps - self.critic.warmup_steps) * self.algorithm.updates

    def _validate_servers(self) -> None:
        if self.rollout.engine is RolloutEngine.JAX:
            return
        engine, servers = self.rollout.engine.value, self.servers
        servers.validate()
        self.weights.validate(self.rollout.engine, servers)
        if self.rollout.engines > servers.servers:
            raise ConfigError(
                f"rollout.engines is {self.rollout.engines}, but there are {servers.servers} servers (servers.count or "
                "servers.addresses); leave rollout.engines at 0: each server is an engine"
            )
        if self.stream_trainer and not servers.colocated:
            raise ConfigError(
                f"stream_trainer lends devices of engines to training, but the devices of {engine} servers do not "
                "belong to the trainer; set servers.colocated, or rollout.engine to jax"
            )
        if servers.colocated and servers.addresses and self.rollout.engine is RolloutEngine.SGLANG:
            raise ConfigError(
                "servers.colocated needs to know which servers sleep when the run begins, and SGLang does not say; let "
                "the run start the servers (servers.count instead of servers.addresses)"
            )
        if servers.colocated and (isinstance(self.policy, AdaptiveAsyncConfig) or self.speculative_sync):
            what = "speculative_sync" if self.speculative_sync else "policy=adaptive_async"
            raise ConfigError(
                f"{what} trains while servers generate, but servers.colocated has the servers sleep during training; "
                "unset one of the two"
            )
        degree = self.parallelism.degree
        if degree > 1 or self.parallelism.enabled:
            flag = "--tp" if self.rollout.engine is RolloutEngine.SERVE else "--tp-size"
            if not any("{degree}" in word for word in servers.flags):
                raise ConfigError(
                    f"parallelism.degree is {degree}, parallelism.min_degree {self.parallelism.min_degree}: servers "
                    f"must be told their degree; add to servers.flags: ('{flag}', '{{degree}}')"
                )
        if self.parallelism.enabled and self.rollout.engines not in (0, servers.servers):
            raise ConfigError(
                f"rollout.engines is {self.rollout.engines}, but with parallelism.min_degree above 0 each of the "
                f"{servers.servers} servers is an engine; leave rollout.engines at 0"
            )
        if self.parallelism.enabled and self.weights.chosen(servers) is not Route.SHM:
            raise ConfigError(
                "parallelism.min_degree above 0 starts servers of each degree on this host; set weights.route to shm, "
                f"not {self.weights.route.value}"
            )

    def validate_scheduling(self) -> None:
        """Raises `ConfigError` for settings of the scheduling that cannot work together."""
        parallelism, policy = self.parallelism, self.policy
        engines = self.rollout.engines  # 0: the number is not settled yet
        if parallelism.degree < parallelism.min_degree:
            raise ConfigError(
                f"parallelism.degree is {parallelism.degree}; it must be at least parallelism.min_degree "
                f"({parallelism.min_degree})"
            )
        early = {"stream_trainer": self.stream_trainer, "speculative_sync": self.speculative_sync}
        early = [name for name, on in early.items() if on]
        if isinstance(policy, AdaptiveAsyncConfig):
            for name in ["parallelism.min_degree"] * parallelism.enabled + early:
                raise ConfigError(f"{name} needs a policy that trains in rounds; adaptive_async never has idle engines")
        if parallelism.enabled and engines and engines * parallelism.degree < 2:
            raise ConfigError(
                "parallelism.min_degree needs at least two devices, but rollout.engines x parallelism.degree is 1"
            )
        if self.stream_trainer and engines == 1:
            raise ConfigError(
                f"stream_trainer needs rollout.engines of at least 2, not {engines}: half are lent to training"
            )
        if self.stream_trainer and getattr(self.sharding.strategy, "hybrid", False):
            raise ConfigError("stream_trainer needs sharding.strategy.hybrid off: lent engines may not be whole hosts")
        for name in early:
            if isinstance(policy, TailBatchingConfig) and policy.max_staleness:
                raise ConfigError(
                    f"{name} needs policy.max_staleness to be 0: it does not count groups that tail batching holds back"
                )
            if self.algorithm.updates > 1:
                raise ConfigError(
                    f"{name} computes gradients before a step is complete, all with the same weights; "
                    "set algorithm.minibatches and algorithm.epochs to 1"
                )
            if self.algorithm.importance.normalize:
                raise ConfigError(
                    f"{name} needs algorithm.importance.normalize off: a step's mean weight is known only at its end"
                )
        limit = policy.staleness_limit
        if self.replay.share and limit is not None and self.replay.max_age > limit:
            raise ConfigError(
                f"replay.max_age is {self.replay.max_age}, but policy.max_staleness is {limit}, and older groups are "
                "not trained on; lower replay.max_age or raise policy.max_staleness"
            )
        make_schedules(self)
        for field, lr in (("optim.lr", self.optim.lr), ("warm_start.lr", self.warm_start.lr)):
            rate_schedule(lr, field)
        if isinstance(self.optim.lr, str) and self.optim.schedule is not Schedule.CONSTANT:
            raise ConfigError(
                f"optim.lr is the schedule {self.optim.lr!r}, so optim.schedule must be constant, not "
                f"{self.optim.schedule.value}"
            )


STRATEGIES: Mapping[str, type] = ShardingConfig.__dataclass_fields__["strategy"].metadata["choices"]
POLICIES: Mapping[str, type] = Config.__dataclass_fields__["policy"].metadata["choices"]
