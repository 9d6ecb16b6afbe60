"""The typed configuration. `configs/*.py` build it, flags override it, `validate()` checks it as a whole.

No heavy import here: `--help` and a typo must answer at once. Sections are mutable because
`--config.section.field=value` sets fields after construction; they have slots so that a configuration file cannot
set a field that does not exist. No section is ever None.
"""

import dataclasses
import enum
import math
from typing import Any

from ..base.errors import ConfigError
from .schedules import make_schedules
from .scheduling import (
    AdaptiveAsyncConfig,
    AprilConfig,
    ComposerConfig,
    ImportanceConfig,
    ParallelismConfig,
    PolicyConfig,
    SchedulesConfig,
    SpeculativeSyncConfig,
    StreamTrainerConfig,
    TailBatchingConfig,
    check,
)


class Strategy(enum.Enum):
    FSDP = "fsdp"  # every device computes whole sequences
    ULYSSES = "ulysses"  # every sequence is spread over the same number of devices
    FLEX_ULYSSES = "flex_ulysses"  # each sequence over as many devices as balance needs
    ODC = "odc"  # every device computes whole sequences at its own pace; those too long for one come first, spread

    @property
    def spreads(self) -> bool:
        """Whether several devices may compute a sequence together."""
        return self is not Strategy.FSDP


class Balance(enum.Enum):
    """Names of `sharding.planner.packing.SCHEDULERS`."""

    LB_MINI = "lb_mini"  # devices even over the whole step, with as many microbatches as each needs
    LB_MICRO = "lb_micro"  # as many microbatches on every device, even one by one: made for collectives
    LOCAL_SORT = "local_sort"  # an equal share in the order drawn, every sequence a microbatch, longest first
    VERL_NATIVE = "verl_native"  # lb_micro over all minibatches of a rollout; a step is one, so here it is lb_micro


class DType(enum.Enum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Remat(enum.Enum):
    NONE = "none"
    LAYER = "layer"  # recompute each layer in the backward pass; only layer inputs are kept


class Algorithm(enum.Enum):
    GRPO = "grpo"
    SFT = "sft"


class LossAggregation(enum.Enum):
    TOKEN_MEAN = "token_mean"  # every token of the step counts the same (DAPO)
    SEQUENCE_MEAN = "sequence_mean"  # every response counts the same, its tokens share that (GRPO)
    CONSTANT = "constant"  # sum over tokens / (responses * max_new_tokens) (Dr.GRPO)


class Schedule(enum.Enum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclasses.dataclass(slots=True)
class ModelConfig:
    path: str = ""  # a local Hugging Face checkpoint folder; empty: the tiny model below, random weights
    vision: bool = True  # tiny model only: Qwen2.5-VL with a vision tower, or Qwen2 text
    hidden_size: int = 64
    intermediate_size: int = 160
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    tie_word_embeddings: bool = False
    rope_theta: float = 30.0  # tiny model: sequences of a few dozen tokens
    mrope_section: tuple[int, ...] = (2, 3, 3)  # frequencies a position axis (time, height, width)
    initializer_range: float = 0.1
    vision_hidden_size: int = 64
    vision_intermediate_size: int = 128
    vision_depth: int = 2
    vision_num_heads: int = 4
    vision_full_attention_layers: tuple[int, ...] = (1,)
    patch_size: int = 8
    window_size: int = 16  # pixels
    compute_dtype: DType = DType.FLOAT32  # master weights stay float32


@dataclasses.dataclass(slots=True)
class SourceConfig:
    """One training source: a folder's manifest or file, and how often it is drawn."""

    path: str = ""  # .jsonl manifest or .parquet; empty: the embedded data set of the source's name
    eval_path: str = ""  # held-out records, same format
    weight: float = 1.0
    reward: str = "exact"  # a name in `fluxjax.rewards`, or module:function
    warm_start_path: str = ""  # records for the warm start, same format; empty: as embedded, or the training records
    # Names of fields (columns) in the file; empty: the usual names are recognised (`fluxjax.data.fields.ALIASES`).
    prompt_field: str = ""
    answer_field: str = ""
    images_field: str = ""
    videos_field: str = ""
    id_field: str = ""


@dataclasses.dataclass(slots=True)
class DataConfig:
    root: str = ""  # where the embedded data sets are built; empty: the user's cache folder
    sources: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    min_pixels: int = 0  # 0: as the checkpoint's preprocessor_config.json says
    max_pixels: int = 0
    # Larger files are skipped, so that none takes all memory: a small one can hold a huge picture.
    max_decoded_pixels: int = 2**26  # of an image or a video frame, before resizing
    max_decoded_frames: int = 2**20  # of a video
    video_frames: int = 4  # frames sampled from a video
    chat_template: bool = False  # render prompts with the checkpoint's chat template, else plain text


@dataclasses.dataclass(slots=True)
class WarmStartConfig:
    """Supervised steps before RL, so that the policy answers in the right form. 0 steps: none."""

    steps: int = 0
    batch_size: int = 64
    lr: float = 2e-3


@dataclasses.dataclass(slots=True)
class RolloutConfig:
    prompts_per_step: int = 32
    group_size: int = 8
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    slots: int = 256  # samples decoded at once by the embedded engine
    max_sequence_tokens: int = 128  # prompt plus response, bound of the KV cache


@dataclasses.dataclass(slots=True)
class AlgorithmConfig:
    name: Algorithm = Algorithm.GRPO
    normalize_std: bool = True  # divide advantages by the group's standard deviation; False as in Dr.GRPO
    clip_low: float = 0.2
    clip_high: float = 0.2  # larger than clip_low: clip-higher (DAPO)
    entropy_coefficient: float = 0.0  # > 0 rewards undecided next-token distributions
    kl_coefficient: float = 0.0  # > 0 keeps a frozen reference model
    loss_aggregation: LossAggregation = LossAggregation.TOKEN_MEAN
    importance: ImportanceConfig = dataclasses.field(default_factory=ImportanceConfig)


@dataclasses.dataclass(slots=True)
class OptimConfig:
    lr: float = 1e-3
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # gradients are clipped to this global norm; 0: they are not


@dataclasses.dataclass(slots=True)
class ShardingConfig:
    # Whole sequences: fsdp; odc (without barriers), which spreads those that no device holds as flex_ulysses would.
    # Spread over devices: ulysses, flex_ulysses.
    strategy: Strategy = Strategy.FSDP
    devices: int = 0  # 0: all that JAX sees
    remat: Remat = Remat.NONE
    vocab_chunk: int = 0  # tokens a chunk of the vocabulary log-softmax; 0: chosen from the vocabulary
    max_degree: int = 0  # devices a sequence is spread over at most (ulysses: always); 0: as devices and heads allow
    alpha: float = 1.1  # flex_ulysses: tokens of a device, at most this times the mean
    devices_per_host: int = 8  # flex_ulysses: sequences are spread further only where nothing else helps; odc: hybrid
    tolerance: float = 0.025  # flex_ulysses: accepted excess of the largest attention load over the smallest possible
    max_shapes: int = 32  # all but fsdp: about so many shapes are compiled in a run; odc: for one device, and for all
    calibration: str = ""  # file of `python -m sharding.calibrate`; empty: flex_ulysses counts length**2, odc FLOPs
    balance: Balance = Balance.LB_MINI  # odc: how sequences are dealt to devices and microbatches
    hybrid: bool = False  # odc: parameters, gradients spread over devices_per_host devices; optimizer state over all
    deterministic: bool = False  # odc: gradients add up in an order fixed by the plan, bitwise; else as they arrive
    live_layers: int = 3  # odc: layers whose weights are on a device at once, at most; at least 2


@dataclasses.dataclass(slots=True)
class PackingConfig:
    tokens_per_row: int = 256
    rows_per_device: int = 16  # of one microbatch
    patches_per_device: int = 4096  # of one microbatch
    share_prompts: bool = True  # compute a group's prompt once for all its responses
    # All but fsdp: a device has one row of tokens_per_row * rows_per_device tokens. Where sequences are spread:
    rounds_per_degree: int = 1  # sequence groups of a device group at most; more overlap more and pad more
    short: int = 1024  # with several rounds: sequences of at most so many tokens are joined (h_pack in FlexRL)
    group_cap: int = 8192  # with several rounds: up to so many tokens of a device group (H_pack)


@dataclasses.dataclass(slots=True)
class CheckpointConfig:
    every: int = 50  # steps; 0: only at the end
    keep: int = 2


@dataclasses.dataclass(slots=True)
class EvaluationConfig:
    every: int = 50  # steps; 0: only at start and end
    samples: int = 200  # held-out prompts a source, at the start and the end
    samples_during: int = 64


@dataclasses.dataclass(slots=True)
class ReportConfig:
    prometheus_port: int = 0  # 0: off
    logprob_gap_alarm: float = 1e-4  # mean absolute; in float32
    dump_samples_every: int = 20  # steps; 0: never
    dump_samples: int = 8  # a dump
    timeline_steps: int = 10  # the Gantt picture shows the last so many steps


@dataclasses.dataclass(slots=True)
class Config:
    name: str = "vlm"
    seed: int = 0
    steps: int = 300
    run_dir: str = ""  # empty: runs/<name>-<date>; an existing one is resumed
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    warm_start: WarmStartConfig = dataclasses.field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
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
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    packing: PackingConfig = dataclasses.field(default_factory=PackingConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    report: ReportConfig = dataclasses.field(default_factory=ReportConfig)

    def validate(self) -> None:
        """Raises `ConfigError` for settings that cannot work together, naming the field, its value and the fix."""
        check_types(self, Config(), "")
        for field in _POSITIVE:
            value = get(self, field)
            if not value > 0:
                raise ConfigError(f"{field} is {value}; it must be greater than 0")
        for field in _NOT_NEGATIVE:
            value = get(self, field)
            if value < 0:
                raise ConfigError(f"{field} is {value}; it must not be negative")
        for field in ("optim.beta1", "optim.beta2"):
            if not 0 <= get(self, field) < 1:
                raise ConfigError(f"{field} is {get(self, field)}; it must be in [0, 1)")
        if self.sharding.alpha < 1:
            raise ConfigError(f"sharding.alpha is {self.sharding.alpha}; less than the mean tokens (1) fits no plan")
        if self.sharding.max_degree & (self.sharding.max_degree - 1):
            raise ConfigError(f"sharding.max_degree is {self.sharding.max_degree}; it must be 0 or a power of two")
        if self.report.prometheus_port > 65535:
            raise ConfigError(f"report.prometheus_port is {self.report.prometheus_port}; ports end at 65535")
        if self.seed >= 2**31:
            raise ConfigError(f"seed is {self.seed}; it must be below 2**31")
        if "/" in self.name or not self.name:
            raise ConfigError(f"name is {self.name!r}; it becomes a folder's name and must have no '/'")
        for name, source in self.data.sources.items():
            if not source.weight > 0:
                raise ConfigError(f"data.sources.{name}.weight is {source.weight}; it must be greater than 0")
        if self.algorithm.name is Algorithm.SFT:
            raise ConfigError("algorithm.name is sft; it serves the warm start (warm_start.steps), RL needs grpo")
        if not self.rollout.temperature >= 1e-6:
            raise ConfigError(
                f"rollout.temperature is {self.rollout.temperature}; it must be at least 1e-6: greedy responses to a "
                "prompt are all the same and teach nothing (evaluations are greedy whatever it is)"
            )
        if self.rollout.top_k >= 2**31:
            raise ConfigError(f"rollout.top_k is {self.rollout.top_k}; it must be below 2**31, 0 is off")
        if not 0 < self.rollout.top_p <= 1:
            raise ConfigError(f"rollout.top_p is {self.rollout.top_p}; it must be in (0, 1], 1 is off")
        if self.rollout.group_size < 2 and self.algorithm.name is Algorithm.GRPO:
            raise ConfigError("rollout.group_size is 1; grpo compares responses of one prompt and needs at least 2")
        if self.rollout.max_new_tokens >= self.rollout.max_sequence_tokens:
            raise ConfigError(
                f"rollout.max_new_tokens ({self.rollout.max_new_tokens}) leaves no room for a prompt in "
                f"rollout.max_sequence_tokens ({self.rollout.max_sequence_tokens})"
            )
        self._validate_strategy()
        if wrong := check(self):
            raise ConfigError(wrong)
        make_schedules(self.schedules)
        if not self.data.sources:
            raise ConfigError("data.sources is empty; name at least one source in the configuration file")
        if not self.model.path:
            self._validate_tiny_model()

    def _validate_strategy(self) -> None:
        strategy, longest = self.sharding.strategy, self.rollout.max_sequence_tokens
        row = self.packing.tokens_per_row
        if strategy is Strategy.FSDP and row < longest:
            raise ConfigError(
                f"packing.tokens_per_row ({row}) is shorter than rollout.max_sequence_tokens ({longest}); the longest "
                "response would not fit"
            )
        if self.sharding.live_layers < 2:
            raise ConfigError(
                f"sharding.live_layers is {self.sharding.live_layers}; it must be at least 2, one layer to compute and "
                "one to fetch"
            )

    def _validate_tiny_model(self) -> None:
        model = self.model
        if model.hidden_size % model.num_heads or (model.hidden_size // model.num_heads) % 2:
            raise ConfigError(
                f"model.hidden_size ({model.hidden_size}) must be model.num_heads ({model.num_heads}) "
                "times an even number"
            )
        if model.num_heads % model.num_kv_heads:
            raise ConfigError(
                f"model.num_heads ({model.num_heads}) must be a multiple of model.num_kv_heads ({model.num_kv_heads})"
            )
        if model.vision and model.vision_hidden_size % (4 * model.vision_num_heads):
            raise ConfigError(
                f"model.vision_hidden_size ({model.vision_hidden_size}) must be model.vision_num_heads "
                f"({model.vision_num_heads}) times a multiple of 4 (rows and columns each take half a rotary embedding)"
            )
        if model.vision and sum(model.mrope_section) * 2 * model.num_heads != model.hidden_size:
            raise ConfigError(
                f"model.mrope_section {model.mrope_section} must sum to half the head size, "
                f"{model.hidden_size // model.num_heads // 2}"
            )
        if wrong := [layer for layer in model.vision_full_attention_layers if not 0 <= layer < model.vision_depth]:
            raise ConfigError(
                f"model.vision_full_attention_layers has {wrong}; layers go from 0 to {model.vision_depth - 1}"
            )
        if model.window_size % (2 * model.patch_size):
            raise ConfigError(
                f"model.window_size ({model.window_size}) must be a multiple of 2 * model.patch_size "
                f"({2 * model.patch_size}), the pixels of a merged feature"
            )


_POSITIVE = [
    "model.intermediate_size",
    "model.vision_hidden_size",
    "model.vision_intermediate_size",
    "model.vision_depth",
    "model.vision_num_heads",
    "model.patch_size",
    "model.window_size",
    "model.rope_theta",
    "model.initializer_range",
    "packing.tokens_per_row",
    "rollout.max_sequence_tokens",
    "steps",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "rollout.slots",
    "optim.lr",
    "optim.eps",
    "warm_start.lr",
    "warm_start.batch_size",
    "packing.rows_per_device",
    "packing.patches_per_device",
    "packing.rounds_per_degree",
    "sharding.max_shapes",
    "sharding.devices_per_host",
    "checkpoint.keep",
    "evaluation.samples",
    "evaluation.samples_during",
    "data.video_frames",
    "data.max_decoded_pixels",
    "data.max_decoded_frames",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.hidden_size",
    "report.logprob_gap_alarm",
    "report.timeline_steps",
]
_NOT_NEGATIVE = [
    "seed",
    "rollout.top_k",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.kl_coefficient",
    "algorithm.entropy_coefficient",
    "optim.warmup_steps",
    "optim.weight_decay",
    "optim.max_grad_norm",
    "warm_start.steps",
    "checkpoint.every",
    "evaluation.every",
    "sharding.devices",
    "sharding.vocab_chunk",
    "sharding.max_degree",
    "sharding.tolerance",
    "packing.short",
    "packing.group_cap",
    "report.prometheus_port",
    "report.dump_samples_every",
    "report.dump_samples",
    "data.min_pixels",
    "data.max_pixels",
]


def check_types(section: Any, default: Any, prefix: str) -> None:
    """Every value has the type that its field declares; numbers are finite. A configuration file may say anything."""
    for field in dataclasses.fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        wanted = getattr(default, field.name)
        if dataclasses.is_dataclass(wanted):
            if type(value) is not type(wanted):
                raise ConfigError(f"{name} must be a {type(wanted).__name__}, not {value!r}")
            check_types(value, wanted, f"{name}.")
        elif field.name == "sources":
            for source, entry in value.items():
                if not isinstance(entry, SourceConfig):
                    raise ConfigError(f"{name}.{source} must be a SourceConfig, not {entry!r}")
                check_types(entry, SourceConfig(), f"{name}.{source}.")
        elif isinstance(wanted, float) and isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{name} is {value}; it must be a finite number")
        elif type(value) is not type(wanted):
            raise ConfigError(f"{name} is {value!r}; it must be of type {type(wanted).__name__}")


def get(config: Config, field: str) -> Any:
    value: Any = config
    for part in field.split("."):
        value = getattr(value, part)
    return value


def to_json(value: Any) -> Any:
    """A configuration (or a part of it) as plain JSON values."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: to_json(v) for name, v in value.items()}
    if isinstance(value, tuple):
        return [to_json(v) for v in value]
    return value.value if isinstance(value, enum.Enum) else value


def from_json(values: dict[str, Any]) -> Config:
    """The inverse of `to_json`. Raises `ConfigError` for what this version does not know."""
    config = Config()
    _fill(config, values, "")
    return config


def _fill(section: Any, values: dict[str, Any], prefix: str) -> None:
    for name, value in values.items():
        if not hasattr(section, name):
            raise ConfigError(f"the saved configuration has a field {prefix}{name} that this version does not know")
        current = getattr(section, name)
        if dataclasses.is_dataclass(current):
            _fill(current, value, f"{prefix}{name}.")
        elif name == "sources":
            for source, fields in value.items():
                current[source] = SourceConfig()
                _fill(current[source], fields, f"{prefix}{name}.{source}.")
        elif isinstance(current, enum.Enum):
            try:
                setattr(section, name, type(current)(value))
            except ValueError as error:
                raise ConfigError(f"the saved configuration has {prefix}{name}: {error}") from None
        else:
            setattr(section, name, tuple(value) if isinstance(current, tuple) else value)
