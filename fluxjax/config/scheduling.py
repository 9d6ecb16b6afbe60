"""The part of the configuration that decides what happens when: policies, what they consult, and corrections.

Sections of `Config`, in a file of their own. Fields that may change during a run are schedules, written as text:
see `fluxjax.config.schedules`.
"""

import dataclasses
import enum
from typing import Any


class Policy(enum.Enum):
    SYNCHRONOUS = "synchronous"  # one thing after the other, strictly on-policy
    TAIL_BATCHING = "tail_batching"  # strictly on-policy; prompts with long answers wait for rounds of their own
    APRIL = "april"  # more prompts than needed; what is unfinished goes on in the next round
    ADAPTIVE_ASYNC = "adaptive_async"  # generation runs ahead of training, as far as staleness allows


class Importance(enum.Enum):
    """How ratios policy / behaviour are kept from growing (`fluxjax.algorithms.importance`)."""

    NONE = "none"  # they are not
    TRUNCATE = "truncate"  # at most `high` (TIS)
    MASK = "mask"  # tokens outside [low, high] do not count (IcePop)


class ImportanceLevel(enum.Enum):
    TOKEN = "token"
    SEQUENCE = "sequence"  # the mean log-ratio of a response, for all of its tokens (geometric mean)


class Order(enum.Enum):
    """Which scored groups are trained on first, where there are more than a step needs."""

    DRAWN = "drawn"  # as drawn
    STALEST = "stalest"  # oldest weights first, so that little becomes too old


@dataclasses.dataclass(slots=True)
class PolicyConfig:
    name: Policy = Policy.SYNCHRONOUS
    dynamic_sampling: bool = False  # groups of equal rewards are not trained on; others are drawn for them (DAPO)
    max_num_gen_batches: int = 10  # of prompts_per_step, that dynamic_sampling generates for a step; 0: no bound (verl)
    engines: int = 1  # embedded engines, each on a device of its own where there are so many


@dataclasses.dataclass(slots=True)
class TailBatchingConfig:
    prompts: float = 1.25  # launched for each one that a step needs, in short rounds (Flexes' eta for P)
    responses: float = 1.25  # launched for each one that a group needs, in short rounds (eta for R)


@dataclasses.dataclass(slots=True)
class AprilConfig:
    oversample: float = 1.5  # prompts under way for each one that a step needs
    max_staleness: int = 4  # versions; a partial response with an older token starts afresh


@dataclasses.dataclass(slots=True)
class StreamTrainerConfig:
    """Flexes, section 4.4: gradients of complete groups are computed while others are still generated."""

    enabled: bool = False
    first: float = 0.2  # of a round's responses complete: the first look whether half of the engines can be spared
    last: float = 0.5  # and the last
    every: float = 0.05
    chunk: int = 0  # groups a portion; 0: an eighth of a step


@dataclasses.dataclass(slots=True)
class ParallelismConfig:
    """Flexes, section 4.2: tensor parallelism of the engines."""

    degree: int = 1  # devices an engine, at the start; a power of two
    enabled: bool = False  # chosen anew each step, by preemptions; else it stays
    min_degree: int = 1  # devices that an engine needs for its weights and a cache
    max_degree: int = 8  # devices of a host
    rise: float = 1.05  # times the preemptions of the step before, above which the degree doubles
    calm: int = 4  # steps without preemption after which it halves
    profile: str = ""  # file of `python -m fluxjax.profile`, which then says the degree at the start; empty: none


@dataclasses.dataclass(slots=True)
class SpeculativeSyncConfig:
    """Flux, insight 2: training begins before a batch is complete, if it is predicted to be complete in time."""

    enabled: bool = False
    confidence: float = 0.5  # that what is missing ends within the time that gradients of the rest take


@dataclasses.dataclass(slots=True)
class AdaptiveAsyncConfig:
    """Flux, component 1. Staleness is in [0, 1]: see `fluxjax.coordinator.policies.staleness`."""

    max_staleness: int = 4  # versions; nothing older is ever trained on
    target_staleness: float = 0.15
    tolerance: float = 0.05  # above target + tolerance all engines are synchronised before anything new begins
    ratio: float = 0.5  # of max_staleness that generation may run ahead, at the start; 0 is synchronous
    min_ratio: float = 0.1
    max_ratio: float = 0.9
    kp: float = 0.1
    ki: float = 0.01
    kd: float = 0.05
    ema: float = 0.9  # of the previous estimate, in the next one
    sync_interval: int = 10  # steps between two forced barriers at most
    kl_weight: float = 0.4
    variance_weight: float = 0.3
    gap_weight: float = 0.3
    kl_normalizer: float = 0.1  # nats that count as staleness 1
    variance_normalizer: float = 2.0  # log1p of the variance of importance weights that counts as 1
    interrupt: bool = True  # new weights reach engines at once, running responses go on under them; False: as they end


@dataclasses.dataclass(slots=True)
class ImportanceConfig:
    """Flux, component 3: one correction for staleness, mixed versions and replay."""

    kind: Importance = Importance.NONE  # what keeps ratios from growing: truncate or mask
    level: ImportanceLevel = ImportanceLevel.TOKEN  # whose ratio: sequence scores all tokens before the step
    low: float = 0.5  # mask: smallest ratio that counts
    high: float = 2.0  # truncate: largest ratio; mask: largest that counts
    decay: float = 1.0  # factor of a token's weight for each version that it is behind
    decoupled: bool = False  # clip around the policy at the start of the step instead of the behaviour policy
    normalize: bool = False  # divide weights by their mean over the step; scores all tokens before it

    @property
    def whole(self) -> bool:
        """Whether a weight depends on other tokens, so that all are scored before the first is trained on."""
        return self.level is ImportanceLevel.SEQUENCE or self.normalize


@dataclasses.dataclass(slots=True)
class ComposerConfig:
    """Flux, component 4: which of the scored groups a step of adaptive_async trains on."""

    order: Order = Order.DRAWN
    stratify: bool = False  # as many of each staleness as there are among the candidates
    curriculum: bool = False  # easy first; less and less by chance as training goes on
    diversity: bool = False  # sources and media kinds in proportion
    lengths: bool = False  # groups of similar length together, so that devices are even


@dataclasses.dataclass(slots=True)
class SchedulesConfig:
    """Values that change during a run, written as `fluxjax.config.schedules` says; empty: the constant.

    `1.0`, `linear(1.2, 0.8)`, `cosine(1.2, 0.8)`, `phases(1.2@0, 1.0@0.2, 0.7@0.7)`, `pid(metric=entropy, target=0.6,
    low=0.5, high=1.2)`. Of the temperature also `success(1.2, 0.8)`, by how many of a prompt's last responses were
    right, and one for each source as `math: 1.0; *: linear(1.2, 0.8)`.
    """

    temperature: str = ""  # of sampling, instead of rollout.temperature; may differ between sources and prompts
    target_staleness: str = ""  # instead of adaptive_async.target_staleness
    tail_prompts: str = ""  # instead of tail_batching.prompts
    tail_responses: str = ""  # instead of tail_batching.responses


def check(config: Any) -> str:
    """What is wrong with the sections above in `config`, naming field, value and fix; empty if nothing is."""
    tail, april, adaptive = config.tail_batching, config.april, config.adaptive_async
    for field, value in (("prompts", tail.prompts), ("responses", tail.responses)):
        if not 1 <= value <= 8:
            return f"tail_batching.{field} is {value}; it must be in [1, 8], 1 launches nothing in excess"
    if not 1 <= april.oversample <= 8:
        return f"april.oversample is {april.oversample}; it must be in [1, 8], 1 is no more than a step needs"
    for name in ("min_ratio", "ratio", "max_ratio", "ema"):
        if not 0 <= getattr(adaptive, name) <= 1:
            return f"adaptive_async.{name} is {getattr(adaptive, name)}; it must be in [0, 1]"
    if not adaptive.min_ratio <= adaptive.ratio <= adaptive.max_ratio:
        return (
            f"adaptive_async.ratio is {adaptive.ratio}; it must be between min_ratio ({adaptive.min_ratio}) and "
            f"max_ratio ({adaptive.max_ratio})"
        )
    for name in ("kp", "ki", "kd"):
        if getattr(adaptive, name) < 0:
            return (
                f"adaptive_async.{name} is {getattr(adaptive, name)}; it must not be negative, or the ratio moves away "
                "from the target"
            )
    for name in ("kl_normalizer", "variance_normalizer", "sync_interval"):
        if not getattr(adaptive, name) > 0:
            return f"adaptive_async.{name} is {getattr(adaptive, name)}; it must be greater than 0"
    for section in ("april", "adaptive_async"):
        if getattr(config, section).max_staleness < 0:
            return f"{section}.max_staleness is {getattr(config, section).max_staleness}; it must not be negative"
    if config.policy.max_num_gen_batches < 0:
        return (
            f"policy.max_num_gen_batches is {config.policy.max_num_gen_batches}; it must not be negative, 0 is no bound"
        )
    if config.policy.engines < 1:
        return f"policy.engines is {config.policy.engines}; it must be at least 1"
    return _check_parallelism(config) or _check_stream(config) or _check_importance(config.algorithm.importance)


def _check_parallelism(config: Any) -> str:
    parallelism, engines = config.parallelism, config.policy.engines
    for name in ("degree", "min_degree", "max_degree"):
        value = getattr(parallelism, name)
        if value < 1 or value & (value - 1):
            return f"parallelism.{name} is {value}; it must be a power of two"
    if parallelism.degree > parallelism.max_degree:
        return f"parallelism.degree is {parallelism.degree}, parallelism.max_degree only {parallelism.max_degree}"
    if parallelism.degree < parallelism.min_degree:
        return f"parallelism.degree is {parallelism.degree}, parallelism.min_degree already {parallelism.min_degree}"
    if not parallelism.rise >= 1:
        return f"parallelism.rise is {parallelism.rise}; it must be at least 1, any rise"
    if parallelism.calm < 1:
        return f"parallelism.calm is {parallelism.calm}; it must be at least 1 step"
    if not parallelism.enabled:
        return "parallelism.profile needs parallelism.enabled" if parallelism.profile else ""
    if config.policy.name is Policy.ADAPTIVE_ASYNC:
        return "parallelism.enabled needs a policy.name that trains in rounds; adaptive_async never has idle engines"
    if engines * parallelism.degree < 2:
        return "parallelism.enabled needs two devices at least: policy.engines x parallelism.degree is 1"
    return ""


def _check_stream(config: Any) -> str:
    stream = config.stream_trainer
    if not 0 <= stream.first <= stream.last < 1:
        return (
            f"stream_trainer.first is {stream.first} and stream_trainer.last {stream.last}; they must be in [0, 1), in "
            "this order"
        )
    if not stream.every > 0:
        return f"stream_trainer.every is {stream.every}; it must be greater than 0"
    if stream.chunk < 0:
        return f"stream_trainer.chunk is {stream.chunk}; it must not be negative, 0 is an eighth of a step"
    if stream.enabled and config.policy.engines < 2:
        return f"stream_trainer.enabled needs policy.engines of at least 2, not {config.policy.engines}: half are lent"
    if not 0 < config.speculative_sync.confidence < 1:
        return f"speculative_sync.confidence is {config.speculative_sync.confidence}; it must be in (0, 1)"
    sections = [name for name in ("stream_trainer", "speculative_sync") if getattr(config, name).enabled]
    return next(filter(None, (_check_portions(config, section) for section in sections)), "")


def _check_portions(config: Any, section: str) -> str:
    """What can't be computed before a step is complete."""
    if config.policy.name is Policy.ADAPTIVE_ASYNC:
        return f"{section}.enabled needs a policy.name that trains in rounds; adaptive_async trains while others run"
    if config.algorithm.importance.normalize:
        return f"{section}.enabled needs algorithm.importance.normalize off: its mean is known at the end of a step"
    if config.sharding.hybrid and section == "stream_trainer":
        return "stream_trainer.enabled needs sharding.hybrid off: the devices of some engines are no whole hosts"
    return ""


def _check_importance(importance: ImportanceConfig) -> str:
    if not 0 <= importance.low < 1:
        return f"algorithm.importance.low is {importance.low}; it must be in [0, 1), so that a ratio of 1 counts"
    if not importance.high > 1:
        return f"algorithm.importance.high is {importance.high}; it must be greater than 1, so that a ratio of 1 counts"
    if not 0 < importance.decay <= 1:
        return f"algorithm.importance.decay is {importance.decay}; it must be in (0, 1], 1 is off"
    return ""
