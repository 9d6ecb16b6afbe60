"""The sections of `Config` that decide what happens when: policies, what they consult, and corrections.

Numbers that may change during a run may be schedules, written as text: see `fluxjax.config.schedules`.
"""

import dataclasses
import enum

from .bounds import Chosen, not_negative, pair, positive, power_of_two, scheduled, within

MAX_DEGREE = 8  # devices of an engine at most: those of a host
PREFERENCES = ("stalest", "stratify", "curriculum", "diversity", "lengths")


class DynamicSampling(enum.Enum):
    """The field of `Reward` that tells the responses of a group apart in dynamic sampling."""

    OFF = "off"  # groups of equal rewards are trained on, too
    CORRECT = "correct"  # right from wrong, whatever else the reward is made of, as in DAPO and verl; or: true
    VALUE = "value"  # the shaped reward

    def __bool__(self) -> bool:
        return self is not DynamicSampling.OFF

    @classmethod
    def _missing_(cls, value: object) -> "DynamicSampling | None":
        return {"true": cls.CORRECT, "false": cls.OFF}.get(str(value))


class Importance(enum.Enum):
    """Ways to keep the ratios policy / behaviour from growing (`fluxjax.algorithms.loss`)."""

    NONE = "none"  # they are not
    TRUNCATE = "truncate"  # at most the larger of `bounds` (TIS)
    MASK = "mask"  # tokens outside of `bounds` do not count (IcePop)


class ImportanceLevel(enum.Enum):
    TOKEN = "token"
    SEQUENCE = "sequence"  # the mean log-ratio of a response, for all of its tokens (geometric mean)


@dataclasses.dataclass(slots=True)
class SynchronousConfig(Chosen):
    """One thing after the other, strictly on-policy."""

    @property
    def staleness_limit(self) -> int | None:
        """The most versions that anything trained on may be behind; None: the policy itself has no such bound."""
        return None


@dataclasses.dataclass(slots=True)
class TailBatchingConfig(Chosen):
    """Prompts with long answers wait for rounds in which nothing is cut off. With the defaults, runs learned as well as
    with synchronous training; Flexes has 1.25, 1.25 and 0 (`docs/log.md`)."""

    prompts: float | str = scheduled(2.0, "[1, 8]")  # launched in short rounds, for each that a step needs
    responses: float | str = scheduled(1.0, "[1, 8]")  # launched in short rounds, for each that a group needs
    # Versions; a long round's groups are spread over the steps in which they are at most so old. 0: they are one step.
    max_staleness: int = not_negative(1)

    @property
    def staleness_limit(self) -> int | None:
        return self.max_staleness or None


@dataclasses.dataclass(slots=True)
class AprilConfig(Chosen):
    """More prompts than needed; what is unfinished goes on in the next round."""

    oversample: float = within(1.5, "[1, 8]")  # prompts under way for each one that a step needs
    max_staleness: int = not_negative(4)  # versions; a partial response with an older token starts afresh

    @property
    def staleness_limit(self) -> int | None:
        return self.max_staleness


@dataclasses.dataclass(slots=True)
class AdaptiveAsyncConfig(Chosen):
    """Generation runs ahead of training, as far as staleness allows (Flux, component 1)."""

    max_staleness: int = not_negative(4)  # versions; nothing older is ever trained on
    # In [0, 1]: see `staleness` in `fluxjax.coordinator.policies.adaptive_async`. A number or a schedule.
    target_staleness: float | str = scheduled(0.15, "[0, 1]")
    # The share of max_staleness by which generation runs ahead when the run begins. It adapts, unless it is 0 (always
    # synchronous) or 1 (always all of max_staleness).
    ratio: float = within(0.5, "[0, 1]")
    interrupt: bool = True  # new weights reach engines at once, running responses go on under them; False: as they end
    # The choice among the scored groups that a step trains on (Flux, component 4), some of: stalest (oldest weights
    # first), stratify (as many of each staleness as there are), curriculum (easy first, less and less), diversity
    # (sources and media kinds in proportion), lengths (similar ones together).
    prefer: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata={
            "holds": lambda value: set(value) <= set(PREFERENCES),
            "allowed": f"have some of {', '.join(PREFERENCES)}",
        },
    )

    @property
    def staleness_limit(self) -> int | None:
        return self.max_staleness


Policy = SynchronousConfig | TailBatchingConfig | AprilConfig | AdaptiveAsyncConfig


@dataclasses.dataclass(slots=True)
class ParallelismConfig:
    """Flexes, section 4.2: tensor parallelism of the engines."""

    degree: int = power_of_two(1)  # devices of an engine, at the start
    # 0: the degree stays. Else it is chosen anew each step, by preemptions, and an engine needs as many devices as this
    # for its weights and a cache.
    min_degree: int = power_of_two(0)
    profile: str = ""  # file of `python benchmarks/engine_profile.py`, which says the first degree; empty: none

    @property
    def enabled(self) -> bool:
        """Says whether the degree is chosen anew each step."""
        return self.min_degree > 0


@dataclasses.dataclass(slots=True)
class ImportanceConfig:
    """Flux, component 3: one correction for staleness, mixed versions and replay."""

    kind: Importance = Importance.NONE  # what keeps ratios from growing: truncate or mask
    level: ImportanceLevel = ImportanceLevel.TOKEN  # whose ratio: sequence scores all tokens before the step
    # The smallest and the largest ratio that count: truncate cuts larger ones to it, mask leaves out all others.
    bounds: tuple[float, float] = pair((0.5, 2.0), "[0, 1)", "(1, inf)", "a ratio of 1 counts")
    decay: float = within(1.0, "(0, 1]")  # factor of a token's weight for each version that it is behind; 1: off
    decoupled: bool = False  # clip around the policy at the start of the step instead of the behaviour policy
    normalize: bool = False  # divide weights by their mean over the step; scores all tokens before it

    @property
    def whole(self) -> bool:
        """Says whether a weight depends on other tokens, so that all are scored before the first is trained on."""
        return self.level is ImportanceLevel.SEQUENCE or self.normalize


@dataclasses.dataclass(slots=True)
class ReplayConfig:
    """Flux, component 3: groups that were trained on are trained on again (`fluxjax.learner.replay`)."""

    share: float = within(0.0, "[0, 1)", "fresh groups are what is kept")  # of a step's groups; 0: no replay
    max_age: int = positive(4)  # versions that the oldest token of a group may be behind
