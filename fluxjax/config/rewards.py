"""The settings of rewards: the terms of a source that has several, and the bounds within which each kind is called."""

import dataclasses
from collections.abc import Mapping

from ..base.errors import ConfigError
from .bounds import positive, within
from .schedules import Phases, Ramp, RunSchedule, parse

JUDGED = 100  # responses that are scored before `rewards.max_failed` is heeded


@dataclasses.dataclass(slots=True)
class RewardTerm:
    """One of several rewards of a source. The first one says which responses are correct."""

    reward: str = ""  # a name in `fluxjax.rewards`, or module:attribute; empty: the term's own name
    weight: str = "1.0"  # in the sum: a constant, or a schedule over the run's progress, such as linear(0.0, 0.2)
    arguments: dict[str, object] = dataclasses.field(default_factory=dict)  # keywords, of a class or a function


@dataclasses.dataclass(slots=True)
class RewardKindConfig:
    """The bounds of one kind of rewards. Built-in rules (`exact`, ...) have none: they take microseconds."""

    seconds: float = positive(10.0)  # that a call may take: for one response, or for a batch
    concurrency: int = positive(8)  # calls at the same time


def _kinds() -> dict[str, RewardKindConfig]:
    return {
        "function": RewardKindConfig(),  # a user's, unless its attribute `kind` names another one
        "batch": RewardKindConfig(seconds=60.0, concurrency=1),  # a user's that scores batches
        "math": RewardKindConfig(seconds=60.0),  # with the start of its processes; a comparison has its own bound
        "format": RewardKindConfig(seconds=60.0),
        "code": RewardKindConfig(seconds=60.0),
        "judge": RewardKindConfig(seconds=60.0, concurrency=32),
    }


@dataclasses.dataclass(slots=True)
class RewardsConfig:
    # The bounds of each kind of rewards, by its name.
    kinds: dict[str, RewardKindConfig] = dataclasses.field(
        default_factory=_kinds, metadata={"entries": RewardKindConfig}
    )
    # Share of the last 1,000 responses that a reward of a source may fail on, from the 100th on; then the run stops.
    max_failed: float = within(0.5, "(0, 1]")
    # Share of a source's answers that its reward may be unable to grade, of up to 500; else the run does not begin.
    max_unreadable: float = within(0.1, "[0, 1]")

    def kind(self, name: str) -> RewardKindConfig:
        """Returns the bounds of a kind; the default ones for a kind that is not named here."""
        return self.kinds.get(name) or RewardKindConfig()


def term_weights(terms: Mapping[str, RewardTerm], field: str) -> dict[str, RunSchedule]:
    """Returns the weights of the terms, by name; `field` is the field that holds them. Raises `ConfigError` for one
    that can't be read, or that depends on more than the run's progress: all samples of a prompt are weighed alike."""
    weights: dict[str, RunSchedule] = {}
    for name, term in terms.items():
        where = f"{field}.{name}.weight"
        weights[name] = parse(term.weight, where, per_prompt=False)
        if not isinstance(weights[name], Ramp | Phases):
            raise ConfigError(f"{where} is {term.weight!r}; it must be a constant, linear, cosine or phases")
    return weights
