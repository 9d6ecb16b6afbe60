"""The sections of `Config` that decide what happens when: policies, what they consult, and corrections.

Fields that may change during a run are schedules, written as text: see `fluxjax.config.schedules`.
"""

import dataclasses
import enum
from typing import Any

from .bounds import not_negative, positive, power_of_two, within


class Policy(enum.Enum):
    SYNCHRONOUS = "synchronous"  # one thing after the other, strictly on-policy
    TAIL_BATCHING = "tail_batching"  # prompts with long answers wait for rounds in which nothing is cut off
    APRIL = "april"  # more prompts than needed; what is unfinished goes on in the next round
    ADAPTIVE_ASYNC = "adaptive_async"  # generation runs ahead of training, as far as staleness allows


class SampledBy(enum.Enum):
    """The field of `Reward` that tells the responses of a group apart in dynamic sampling."""

    CORRECT = "correct"  # right from wrong, whatever else the reward is made of, as in DAPO and verl
    VALUE = "value"


class Importance(enum.Enum):
    """Ways to keep the ratios policy / behaviour from growing (`fluxjax.algorithms.importance`)."""

    NONE = "none"  # they are not
    TRUNCATE = "truncate"  # at most `high` (TIS)
    MASK = "mask"  # tokens outside [low, high] do not count (IcePop)


class ImportanceLevel(enum.Enum):
    TOKEN = "token"
    SEQUENCE = "sequence"  # the mean log-ratio of a response, for all of its tokens (geometric mean)


class Order(enum.Enum):
    """Orders in which scored groups are trained on, where there are more than a step needs."""

    DRAWN = "drawn"  # as drawn
    STALEST = "stalest"  # oldest weights first, so that little becomes too old


_AWAY = "else the ratio moves away from the target"


@dataclasses.dataclass(slots=True)
class PolicyConfig:
    name: Policy = Policy.SYNCHRONOUS
    dynamic_sampling: bool = False  # groups of equal rewards are not trained on; others are drawn for them (DAPO)
    dynamic_sampling_by: SampledBy = SampledBy.CORRECT  # what must differ: correct, or value, the shaped reward
    max_num_gen_batches: int = not_negative(10)  # prompts_per_step that dynamic_sampling generates a step; 0: no bound
    # Embedded engines, each on devices of its own where there are so many. 0: as many as the accelerators of the host
    # allow at parallelism.degree each; 1 on a CPU, whose devices share its cores.
    engines: int = not_negative(0)


@dataclasses.dataclass(slots=True)
class TailBatchingConfig:
    """Settings of tail batching. With the defaults, runs learned as well as with synchronous training; Flexes has 1.25,
    1.25 and 0 (`docs/log.md`)."""

    prompts: float = within(2.0, "[1, 8]")  # launched in short rounds, for each that a step needs (Flexes' eta for P)
    responses: float = within(1.0, "[1, 8]")  # launched in short rounds, for each that a group needs (eta for R)
    # Versions; a long round's groups are spread over the steps in which they are at most so old. 0: they are one step.
    max_staleness: int = not_negative(1)


@dataclasses.dataclass(slots=True)
class AprilConfig:
    oversample: float = within(1.5, "[1, 8]")  # prompts under way for each one that a step needs
    max_staleness: int = not_negative(4)  # versions; a partial response with an older token starts afresh


@dataclasses.dataclass(slots=True)
class StreamTrainerConfig:
    """Flexes, section 4.4: gradients of complete groups are computed while others are still generated."""

    enabled: bool = False
    first: float = within(0.2, "[0, 1)")  # share of a round's responses at which engines to lend are first looked for
    last: float = within(0.5, "[0, 1)")  # share at which they are last looked for
    every: float = positive(0.05)  # share from one look to the next
    chunk: int = not_negative(0)  # groups a portion; 0: an eighth of a step


@dataclasses.dataclass(slots=True)
class ParallelismConfig:
    """Flexes, section 4.2: tensor parallelism of the engines."""

    degree: int = power_of_two(1)  # devices of an engine, at the start
    enabled: bool = False  # chosen anew each step, by preemptions; else it stays
    min_degree: int = power_of_two(1)  # devices that an engine needs for its weights and a cache
    max_degree: int = power_of_two(8)  # devices of a host
    rise: float = within(1.05, "[1, inf)")  # the degree doubles above so many times the preemptions of the step before
    calm: int = within(4, "[1, inf)")  # steps without preemption after which it halves
    profile: str = ""  # file of `python benchmarks/engine_profile.py`, which says the first degree; empty: none


@dataclasses.dataclass(slots=True)
class SpeculativeSyncConfig:
    """Flux, insight 2: training begins before a batch is complete, if it is predicted to be complete in time."""

    enabled: bool = False
    confidence: float = within(0.5, "(0, 1)")  # that the rest ends while gradients of what is there are computed


@dataclasses.dataclass(slots=True)
class AdaptiveAsyncConfig:
    """Flux, component 1. Staleness is in [0, 1]: see `staleness` in `fluxjax.coordinator.policies.adaptive_async`."""

    max_staleness: int = not_negative(4)  # versions; nothing older is ever trained on
    target_staleness: float = 0.15
    tolerance: float = 0.05  # above target + tolerance all engines are synchronised before anything new begins
    ratio: float = within(0.5, "[0, 1]")  # of max_staleness that generation runs ahead, at the start; 0: synchronous
    min_ratio: float = within(0.1, "[0, 1]")
    max_ratio: float = within(0.9, "[0, 1]")
    kp: float = within(0.1, "[0, inf)", _AWAY)
    ki: float = within(0.01, "[0, inf)", _AWAY)
    kd: float = within(0.05, "[0, inf)", _AWAY)
    ema: float = within(0.9, "[0, 1]")  # of the previous estimate, in the next one
    sync_interval: int = positive(10)  # steps between two forced barriers at most
    kl_weight: float = 0.4
    variance_weight: float = 0.3
    gap_weight: float = 0.3
    kl_normalizer: float = positive(0.1)  # nats that count as staleness 1
    variance_normalizer: float = positive(2.0)  # log1p of the variance of importance weights that counts as 1
    interrupt: bool = True  # new weights reach engines at once, running responses go on under them; False: as they end


@dataclasses.dataclass(slots=True)
class ImportanceConfig:
    """Flux, component 3: one correction for staleness, mixed versions and replay."""

    kind: Importance = Importance.NONE  # what keeps ratios from growing: truncate or mask
    level: ImportanceLevel = ImportanceLevel.TOKEN  # whose ratio: sequence scores all tokens before the step
    low: float = within(0.5, "[0, 1)", "a ratio of 1 counts")  # mask: smallest ratio that counts
    high: float = within(2.0, "(1, inf)", "a ratio of 1 counts")  # truncate: largest ratio; mask: largest that counts
    decay: float = within(1.0, "(0, 1]")  # factor of a token's weight for each version that it is behind; 1: off
    decoupled: bool = False  # clip around the policy at the start of the step instead of the behaviour policy
    normalize: bool = False  # divide weights by their mean over the step; scores all tokens before it

    @property
    def whole(self) -> bool:
        """Says whether a weight depends on other tokens, so that all are scored before the first is trained on."""
        return self.level is ImportanceLevel.SEQUENCE or self.normalize


class ReplayOrder(enum.Enum):
    """Orders in which groups that were trained on are replayed."""

    NEWEST = "newest"
    OLDEST = "oldest"
    ADVANTAGE = "advantage"  # those with the largest advantages, in magnitude and on average


@dataclasses.dataclass(slots=True)
class ReplayConfig:
    """Flux, component 3: groups that were trained on are trained on again (`fluxjax.learner.replay`)."""

    share: float = within(0.0, "[0, 1)", "fresh groups are what is kept")  # of a step's groups; 0: no replay
    groups: int = positive(256)  # that are kept at most; the oldest go first
    max_age: int = positive(4)  # versions that the oldest token of a group may be behind
    times: int = positive(1)  # that a group may be replayed
    order: ReplayOrder = ReplayOrder.NEWEST


@dataclasses.dataclass(slots=True)
class ComposerConfig:
    """Flux, component 4: the choice among the scored groups that a step of adaptive_async trains on."""

    order: Order = Order.DRAWN
    stratify: bool = False  # as many of each staleness as there are among the candidates
    curriculum: bool = False  # easy first; less and less by chance as training goes on
    diversity: bool = False  # sources and media kinds in proportion
    lengths: bool = False  # groups of similar length together, so that devices are even


def _schedule(low: float, high: float) -> Any:
    """Declares a field that holds the text of a schedule, whose values are in [low, high]."""
    return dataclasses.field(default="", metadata={"values": (low, high)})


@dataclasses.dataclass(slots=True)
class SchedulesConfig:
    """Values that change during a run, such as `linear(1.2, 0.8)`; `fluxjax.config.schedules` says what may be written.
    Empty: the constant."""

    temperature: str = _schedule(1e-3, 100.0)  # instead of rollout.temperature; may differ between sources and prompts
    target_staleness: str = _schedule(0.0, 1.0)  # instead of adaptive_async.target_staleness
    tail_prompts: str = _schedule(1.0, 8.0)  # instead of tail_batching.prompts
    tail_responses: str = _schedule(1.0, 8.0)  # instead of tail_batching.responses
