"""The typed configuration: `configs/*.py` build it, flags override it, `validate()` checks it as a whole.

Each field declares its bound (`fluxjax.config.bounds`) and the comment that `--help` shows. Nothing heavy is imported:
`--help` and a typo must answer at once. Sections are mutable, because flags set fields after construction; they have
slots, so that a configuration file cannot set a field that does not exist. No section is ever None.
"""

import dataclasses
import enum
import re
from typing import ClassVar

from ..base.errors import ConfigError
from .algorithms import OWN_SETTINGS as OWN_SETTINGS
from .algorithms import AlgorithmConfig, LoraConfig
from .algorithms import CriticConfig as CriticConfig
from .algorithms import KlEstimator as KlEstimator
from .algorithms import LossAggregation as LossAggregation
from .bounds import bounded, check_fields, not_negative, positive, within
from .data import DataConfig
from .data import SourceConfig as SourceConfig
from .rewards import RewardKindConfig as RewardKindConfig
from .rewards import RewardsConfig
from .rewards import RewardTerm as RewardTerm
from .schedules import make_schedules
from .scheduling import (
    AdaptiveAsyncConfig,
    AprilConfig,
    ComposerConfig,
    ParallelismConfig,
    Policy,
    PolicyConfig,
    SchedulesConfig,
    SpeculativeSyncConfig,
    StreamTrainerConfig,
    TailBatchingConfig,
)
from .scheduling import Importance as Importance
from .scheduling import ImportanceConfig as ImportanceConfig
from .scheduling import ImportanceLevel as ImportanceLevel
from .scheduling import Order as Order
from .scheduling import ReplayConfig as ReplayConfig
from .scheduling import ReplayOrder as ReplayOrder
from .scheduling import SampledBy as SampledBy
from .servers import RolloutEngine, ServersConfig
from .weight_sync import Route as Route
from .weight_sync import WeightsConfig


class Strategy(enum.Enum):
    FSDP = "fsdp"  # every device computes whole sequences
    ULYSSES = "ulysses"  # every sequence is spread over the same number of devices
    FLEX_ULYSSES = "flex_ulysses"  # each sequence over as many devices as balance needs
    ODC = "odc"  # every device computes whole sequences at its own pace; those too long for one come first, spread

    @property
    def spreads(self) -> bool:
        """Says whether several devices may compute a sequence together."""
        return self is not Strategy.FSDP


class DType(enum.Enum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Remat(enum.Enum):
    NONE = "none"
    DOTS = "dots"  # the backward pass keeps a layer's input and products with weights, and computes the rest again
    LAYER = "layer"  # it keeps a layer's input
    OFFLOAD = "offload"  # as layer, but in the host's memory
    AUTO = "auto"  # the first of these with which the pre-flight fits; none where there is no pre-flight


class Schedule(enum.Enum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclasses.dataclass(slots=True)
class ModelConfig:
    of_any: ClassVar[tuple[str, ...]] = ("path", "compute_dtype")  # the other fields are the tiny model's
    path: str = ""  # a local Hugging Face checkpoint folder; empty: the tiny model below, random weights
    vision: bool = True  # tiny model only: Qwen2.5-VL with a vision tower, or Qwen2 text
    hidden_size: int = positive(64)
    intermediate_size: int = positive(160)
    num_layers: int = positive(3)
    num_heads: int = positive(4)
    num_kv_heads: int = positive(2)
    tie_word_embeddings: bool = False
    rope_theta: float = positive(30.0)  # tiny model: sequences of a few dozen tokens
    mrope_section: tuple[int, ...] = (2, 3, 3)  # frequencies a position axis (time, height, width)
    initializer_range: float = positive(0.1)
    vision_hidden_size: int = positive(64)
    vision_intermediate_size: int = positive(128)
    vision_depth: int = positive(2)
    vision_num_heads: int = positive(4)
    vision_full_attention_layers: tuple[int, ...] = (1,)
    patch_size: int = positive(8)
    window_size: int = positive(16)  # pixels
    compute_dtype: DType = DType.FLOAT32  # master weights stay float32

    def validate_tiny(self) -> None:
        """Raises `ConfigError` for a tiny model that cannot be built."""
        multiples = [
            ("hidden_size", "num_heads", 2, "a head's rotary embedding has pairs"),
            ("num_heads", "num_kv_heads", 1, "as many heads share each"),
            ("window_size", "patch_size", 2, "2 x 2 patches are a merged feature"),
        ]
        if self.vision:
            why = "rows and columns each take half a rotary embedding"
            multiples.append(("vision_hidden_size", "vision_num_heads", 4, why))
        for name, unit, factor, why in multiples:
            value, units = getattr(self, name), getattr(self, unit)
            if value % (factor * units):
                raise ConfigError(
                    f"model.{name} ({value}) must be a multiple of {factor} x model.{unit} ({units}): {why}"
                )
        if self.vision and sum(self.mrope_section) * 2 * self.num_heads != self.hidden_size:
            raise ConfigError(
                f"model.mrope_section {self.mrope_section} must sum to half the head size, "
                f"{self.hidden_size // self.num_heads // 2}"
            )
        if wrong := [layer for layer in self.vision_full_attention_layers if not 0 <= layer < self.vision_depth]:
            raise ConfigError(
                f"model.vision_full_attention_layers has {wrong}; layers go from 0 to {self.vision_depth - 1}"
            )


@dataclasses.dataclass(slots=True)
class WarmStartConfig:
    """Supervised steps before RL, so that the policy answers in the right form."""

    steps: int = not_negative(0)  # 0: no warm start
    batch_size: int = positive(64)
    lr: float = positive(2e-3)


@dataclasses.dataclass(slots=True)
class RolloutConfig:
    engine: RolloutEngine = RolloutEngine.JAX
    prompts_per_step: int = positive(32)
    group_size: int = positive(8)
    max_new_tokens: int = positive(16)
    temperature: float = bounded(
        1.0,
        lambda value: value >= 1e-6,
        "be at least 1e-6: greedy responses to a prompt are all the same and teach nothing (evaluations are greedy "
        "whatever it is)",
    )
    top_p: float = within(1.0, "(0, 1]")  # 1: off
    top_k: int = bounded(0, lambda value: 0 <= value < 2**31, "be below 2**31 and not negative")  # 0: off
    slots: int = positive(256)  # samples decoded at once by an engine
    max_sequence_tokens: int = positive(128)  # prompt plus response
    # Tokens in the KV cache of each engine, shared by its slots. 0: as a server's memory allows; in the embedded engine
    # as many as all slots may need, within kv_fraction of the device memory that is free before the first request (on
    # CPUs, which don't tell: within 4 GiB).
    kv_tokens: int = not_negative(0)
    kv_fraction: float = within(0.5, "(0, 1)")  # training needs the rest for its activations


@dataclasses.dataclass(slots=True)
class OptimConfig:
    lr: float = positive(1e-3)
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = not_negative(0)
    beta1: float = within(0.9, "[0, 1)")
    beta2: float = within(0.99, "[0, 1)")
    eps: float = positive(1e-8)
    weight_decay: float = not_negative(0.0)  # of matrices and embeddings; norms and biases have none
    max_grad_norm: float = not_negative(1.0)  # gradients are clipped to this global norm; 0: they are not
    moments_dtype: DType = DType.FLOAT32  # in which Adam's two moments are kept; they are computed in float32
    gradients_dtype: DType = DType.FLOAT32  # in which gradients are summed over the microbatches of a step


@dataclasses.dataclass(slots=True)
class ShardingConfig:
    # Whole sequences: fsdp; odc (without barriers), which spreads those that no device holds as flex_ulysses would.
    # Spread over devices: ulysses, flex_ulysses.
    strategy: Strategy = Strategy.FSDP
    devices: int = not_negative(0)  # 0: all that JAX sees
    remat: Remat = Remat.NONE  # not offload under odc
    preflight: bool = True  # on GPUs, train compiles its largest programs first, and refuses what does not fit
    device_memory_gib: float = not_negative(0.0)  # must suffice; 0: what JAX may use of a GPU, on CPUs no check
    vocab_chunk: int = not_negative(0)  # tokens of whom logits exist at once (GPUs: gradients of these); 0: chosen
    max_degree: int = bounded(  # most devices of a sequence (ulysses: of each); 0: as devices and heads allow
        0, lambda value: value >= 0 and not value & (value - 1), "be 0 or a power of two"
    )
    alpha: float = within(1.1, "[1, inf)")  # flex_ulysses: tokens of a device, at most this times the mean
    devices_per_host: int = positive(8)  # flex_ulysses: sequences stay within a host if that fits; odc: see hybrid
    tolerance: float = not_negative(0.025)  # flex_ulysses: accepted excess of the largest attention load over the least
    max_shapes: int = positive(32)  # at most so many shapes of microbatches are compiled, for each number of devices
    compile_ahead: int = not_negative(0)  # steps for which a new shape compiles in the background; 0: at once; not odc
    calibration: str = ""  # file of `python benchmarks/calibrate.py`; empty: flex_ulysses counts length**2, odc FLOPs
    hybrid: bool = False  # odc: parameters, gradients spread over devices_per_host devices; optimizer state over all
    deterministic: bool = False  # odc: gradients add up in an order fixed by the plan, bitwise; else as they arrive
    live_layers: int = within(  # odc: layers whose weights are on a device at once, at most
        3, "[2, inf)", "one layer to compute and one to fetch"
    )


@dataclasses.dataclass(slots=True)
class PackingConfig:
    tokens_per_row: int = positive(256)  # fsdp, from 1024: the most; rows are shorter where that saves padding
    rows_per_device: int = positive(16)  # of one microbatch; fsdp: the most
    patches_per_device: int = positive(4096)  # of one microbatch
    share_prompts: bool = True  # compute a group's prompt once for all its responses
    # All but fsdp: a device has one row of tokens_per_row * rows_per_device tokens. Where sequences are spread:
    rounds_per_degree: int = positive(1)  # sequence groups of a device group at most; more overlap more and pad more
    short: int = not_negative(1024)  # several rounds: sequences of at most so many tokens are joined (FlexRL's h_pack)
    group_cap: int = not_negative(8192)  # several rounds: up to so many tokens of a device group (FlexRL's H_pack)


@dataclasses.dataclass(slots=True)
class CheckpointConfig:
    every: int = not_negative(50)  # steps; 0: only at the end
    keep: int = positive(2)
    # Steps; 0: never. Each process keeps its part of the two newest in the memory of its host, from where as many
    # processes go on when one has failed.
    snapshot_every: int = not_negative(0)
    snapshot_folder: str = "/dev/shm"


@dataclasses.dataclass(slots=True)
class EvaluationConfig:
    every: int = not_negative(50)  # steps; 0: only at start and end
    samples: int = positive(200)  # held-out prompts a source, at the start and the end
    samples_during: int = positive(64)


@dataclasses.dataclass(slots=True)
class ReportConfig:
    prometheus_port: int = within(0, "[0, 65535]")  # 0: off
    prometheus_host: str = "127.0.0.1"  # to listen on; beyond loopback needs FLUXJAX_TOKEN, a scraper's credentials
    logprob_gap_alarm: float = positive(1e-4)  # mean absolute; in float32
    dump_samples_every: int = not_negative(20)  # steps; 0: never
    dump_samples: int = not_negative(8)  # a dump
    timeline_steps: int = positive(10)  # the Gantt picture shows the last so many steps


@dataclasses.dataclass(slots=True)
class DistributedConfig:
    """Several trainer processes, one a host. Those of Slurm and Open MPI find each other; elsewhere, three fields are
    given. `python -m fluxjax.launch` starts them on one machine."""

    coordinator: str = ""  # host:port of process 0
    processes: int = not_negative(0)  # 0: as many as Slurm has tasks or Open MPI ranks, else one
    process: int = not_negative(0)  # this one's number, from 0
    timeout: float = positive(15.0)  # seconds of silence after which a process is taken for lost
    start_timeout: float = positive(300.0)  # seconds in which all must have come
    # Seconds that a process may be at one step, or one checkpoint, before all end; compiling does not count.
    progress_timeout: float = positive(900.0)


@dataclasses.dataclass(slots=True)
class Config:
    """All settings of a run. `unread` are sections and fields that the command with this configuration never reads."""

    unread: ClassVar[tuple[str, ...]] = ()
    name: str = bounded("vlm", lambda value: value != "" and "/" not in value, "be a folder's name, without '/'")
    seed: int = bounded(0, lambda value: 0 <= value < 2**31, "be in [0, 2**31)")
    steps: int = positive(300)
    run_dir: str = ""  # empty: runs/<name>-<date>; an existing one is resumed
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rewards: RewardsConfig = dataclasses.field(default_factory=RewardsConfig)
    warm_start: WarmStartConfig = dataclasses.field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    servers: ServersConfig = dataclasses.field(default_factory=ServersConfig)
    weights: WeightsConfig = dataclasses.field(default_factory=WeightsConfig)
    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    tail_batching: TailBatchingConfig = dataclasses.field(default_factory=TailBatchingConfig)
    april: AprilConfig = dataclasses.field(default_factory=AprilConfig)
    stream_trainer: StreamTrainerConfig = dataclasses.field(default_factory=StreamTrainerConfig)
    speculative_sync: SpeculativeSyncConfig = dataclasses.field(default_factory=SpeculativeSyncConfig)
    adaptive_async: AdaptiveAsyncConfig = dataclasses.field(default_factory=AdaptiveAsyncConfig)
    parallelism: ParallelismConfig = dataclasses.field(default_factory=ParallelismConfig)
    composer: ComposerConfig = dataclasses.field(default_factory=ComposerConfig)
    schedules: SchedulesConfig = dataclasses.field(default_factory=SchedulesConfig)
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
        self.lora.validate()
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
        if self.sharding.strategy is Strategy.FSDP and row < longest:
            raise ConfigError(
                f"packing.tokens_per_row ({row}) is shorter than rollout.max_sequence_tokens ({longest}); the longest "
                "response would not fit"
            )
        if self.optim.moments_dtype is DType.BFLOAT16 and self.optim.beta2 > 1 - 2**-7:
            raise ConfigError(
                f"optim.moments_dtype is bfloat16, whose 8 bits lose what optim.beta2 = {self.optim.beta2} adds to the "
                "second moment in a step; lower optim.beta2 to 0.99"
            )
        if self.sharding.compile_ahead and self.sharding.strategy is Strategy.ODC:
            raise ConfigError(
                f"sharding.compile_ahead={self.sharding.compile_ahead} is not possible under sharding.strategy=odc, "
                "where each device compiles stages of its own; set it to 0"
            )
        if self.sharding.remat is Remat.OFFLOAD and self.sharding.strategy is Strategy.ODC:
            raise ConfigError("sharding.remat is offload, which odc can't; set it to layer")
        distributed = self.distributed
        if distributed.process >= max(distributed.processes, 1):
            raise ConfigError(
                f"distributed.process is {distributed.process}; it must be below distributed.processes "
                f"({distributed.processes})"
            )
        if distributed.processes > 1 and not re.fullmatch(r".+:\d+", distributed.coordinator):
            raise ConfigError(
                f"distributed.coordinator is {distributed.coordinator!r}; of {distributed.processes} processes it must "
                "be the host:port of process 0"
            )
        if not self.data.sources:
            raise ConfigError("data.sources is empty; name at least one source in the configuration file")
        for name, source in self.data.sources.items():
            source.validate_rewards(f"data.sources.{name}")
        if not self.model.path:
            self.model.validate_tiny()

    @property
    def policy_updates(self) -> int:
        """The number of the policy's optimizer steps in a run of RL."""
        return (self.steps - self.critic.warmup_steps) * self.algorithm.updates

    def _validate_servers(self) -> None:
        if self.rollout.engine is RolloutEngine.JAX:
            return
        engine, servers = self.rollout.engine.value, self.servers
        servers.validate()
        self.weights.validate(self.rollout.engine, servers)
        if self.policy.engines > servers.servers:
            raise ConfigError(
                f"policy.engines is {self.policy.engines}, but there are {servers.servers} servers (servers.count or "
                "servers.addresses); leave it at 0, an engine a server"
            )
        if self.stream_trainer.enabled and not servers.colocated:
            raise ConfigError(
                f"stream_trainer.enabled lends devices of engines to training, but those of {engine} servers are not "
                "the trainer's; set servers.colocated, or rollout.engine to jax"
            )
        if servers.colocated and servers.addresses and self.rollout.engine is RolloutEngine.SGLANG:
            raise ConfigError(
                "servers.colocated needs to know which servers sleep when the run begins, and SGLang does not say; let "
                "the run start them (servers.count), not servers.addresses"
            )
        if servers.colocated and (self.policy.name is Policy.ADAPTIVE_ASYNC or self.speculative_sync.enabled):
            what = "speculative_sync.enabled" if self.speculative_sync.enabled else "policy.name=adaptive_async"
            raise ConfigError(f"{what} trains while servers generate; servers.colocated has them sleep: unset one")
        degree = self.parallelism.degree
        if degree > 1 or self.parallelism.enabled:
            flag = "--tp" if self.rollout.engine is RolloutEngine.SERVE else "--tp-size"
            if not any("{degree}" in word for word in servers.flags):
                raise ConfigError(
                    f"parallelism.degree is {degree}, parallelism.enabled {self.parallelism.enabled}: servers must be "
                    f"told, in servers.flags: ('{flag}', '{{degree}}')"
                )
        if self.parallelism.enabled and self.policy.engines not in (0, servers.servers):
            raise ConfigError(
                f"policy.engines is {self.policy.engines}, but parallelism.enabled has an engine a server "
                f"({servers.servers}); leave it at 0"
            )
        if self.parallelism.enabled and self.weights.chosen(servers) is not Route.SHM:
            raise ConfigError(
                f"parallelism.enabled has servers of each degree on this host; set weights.route to shm, not "
                f"{self.weights.route.value}"
            )

    def validate_scheduling(self) -> None:
        """Raises `ConfigError` for policies, and for what they consult, that cannot work together."""
        adaptive, stream, parallelism = self.adaptive_async, self.stream_trainer, self.parallelism
        engines = self.policy.engines  # 0: not known before the devices are
        if not adaptive.min_ratio <= adaptive.ratio <= adaptive.max_ratio:
            raise ConfigError(
                f"adaptive_async.ratio is {adaptive.ratio}; it must be between min_ratio ({adaptive.min_ratio}) and "
                f"max_ratio ({adaptive.max_ratio})"
            )
        if parallelism.degree > parallelism.max_degree:
            raise ConfigError(
                f"parallelism.degree is {parallelism.degree}, parallelism.max_degree only {parallelism.max_degree}"
            )
        if parallelism.degree < parallelism.min_degree:
            raise ConfigError(
                f"parallelism.degree is {parallelism.degree}, parallelism.min_degree already {parallelism.min_degree}"
            )
        if parallelism.profile and not parallelism.enabled:
            raise ConfigError("parallelism.profile needs parallelism.enabled")
        for name in ("parallelism", "stream_trainer", "speculative_sync"):
            if getattr(self, name).enabled and self.policy.name is Policy.ADAPTIVE_ASYNC:
                raise ConfigError(
                    f"{name}.enabled needs a policy.name that trains in rounds; adaptive_async never has idle engines"
                )
        if parallelism.enabled and engines and engines * parallelism.degree < 2:
            raise ConfigError("parallelism.enabled needs two devices at least: policy.engines x parallelism.degree = 1")
        if stream.first > stream.last:
            raise ConfigError(
                f"stream_trainer.first is {stream.first} and stream_trainer.last {stream.last}; the first must "
                "not be above the last"
            )
        if stream.enabled and engines == 1:
            raise ConfigError(f"stream_trainer.enabled needs policy.engines of at least 2, not {engines}: half is lent")
        if stream.enabled and self.sharding.hybrid:
            raise ConfigError(
                "stream_trainer.enabled needs sharding.hybrid off: the devices of some engines are no whole hosts"
            )
        for name in ("stream_trainer", "speculative_sync"):
            held = self.policy.name is Policy.TAIL_BATCHING and self.tail_batching.max_staleness
            if getattr(self, name).enabled and held:
                raise ConfigError(f"{name}.enabled needs tail_batching.max_staleness to be 0: it counts no held groups")
            if getattr(self, name).enabled and self.algorithm.updates > 1:
                raise ConfigError(
                    f"{name}.enabled computes gradients before a step is complete, all of the same weights; set "
                    "algorithm.minibatches and algorithm.epochs to 1"
                )
            if getattr(self, name).enabled and self.algorithm.importance.normalize:
                raise ConfigError(
                    f"{name}.enabled needs algorithm.importance.normalize off: its mean is known at the end of a step"
                )
        self._validate_replay()
        make_schedules(self.schedules)

    def _validate_replay(self) -> None:
        """Raises `ConfigError` where replay would train on older versions than the policy allows."""
        limits = {Policy.APRIL: self.april.max_staleness, Policy.ADAPTIVE_ASYNC: self.adaptive_async.max_staleness}
        if self.tail_batching.max_staleness:
            limits[Policy.TAIL_BATCHING] = self.tail_batching.max_staleness
        limit, name = limits.get(self.policy.name), self.policy.name.value
        if self.replay.share and limit is not None and self.replay.max_age > limit:
            raise ConfigError(
                f"replay.max_age is {self.replay.max_age}, but {name}.max_staleness is {limit}, and nothing older is "
                "trained on; lower the one or raise the other"
            )
