"""The settings of prompts and scores: sources, preprocessing of media, bounds of calls for each kind of rewards."""

import dataclasses
from collections.abc import Mapping

from ..base.errors import ConfigError
from ..base.medium import CONTEXT, WHOLE
from .bounds import Section, bounded, not_negative, positive, within
from .schedules import Phases, Ramp, RunSchedule, parse

COLUMNS = ("prompt", "answer", "images", "videos", "id")
JUDGED = 100  # responses that are scored before `rewards.max_failed` applies


@dataclasses.dataclass(slots=True)
class RewardTerm(Section):
    """One of several rewards of a source. The first reward decides which responses are correct."""

    reward: str = ""  # a name in `fluxjax.rewards`, or module:attribute; empty: the term's own name
    weight: str = "1.0"  # in the sum of terms: a constant, or a schedule over the run, such as linear(0.0, 0.2)
    arguments: dict[str, object] = dataclasses.field(default_factory=dict)  # keyword arguments of the reward


@dataclasses.dataclass(slots=True)
class RewardKindConfig(Section):
    """The bounds of one kind of rewards. Built-in rules (`exact`, ...) take microseconds, and have no bounds."""

    seconds: float = positive(10.0)  # seconds that a call may take, for one response or for a batch
    concurrency: int = positive(8)  # calls at the same time


def _kinds() -> dict[str, RewardKindConfig]:
    return {
        "function": RewardKindConfig(),  # a user's function, unless its attribute `kind` names another kind
        "batch": RewardKindConfig(seconds=60.0, concurrency=1),  # a user's function that scores batches
        "math": RewardKindConfig(seconds=60.0),  # including the start of its processes; a comparison has its own bound
        "format": RewardKindConfig(seconds=60.0),
        "code": RewardKindConfig(seconds=60.0),
        "judge": RewardKindConfig(seconds=60.0, concurrency=32),
    }


@dataclasses.dataclass(slots=True)
class RewardsConfig(Section):
    # The bounds of each kind of rewards, by its name.
    kinds: dict[str, RewardKindConfig] = dataclasses.field(
        default_factory=_kinds, metadata={"entries": RewardKindConfig}
    )
    # Share of a source's last 1,000 responses that a reward may fail on, once 100 are scored; above it, the run stops.
    max_failed: float = within(0.5, "(0, 1]")
    # Share of a source's first 500 answers that its reward may be unable to grade; above it, the run does not begin.
    max_unreadable: float = within(0.1, "[0, 1]")

    def kind(self, name: str) -> RewardKindConfig:
        """Returns the bounds of a kind; the default bounds for a kind that `kinds` lacks."""
        return self.kinds.get(name) or RewardKindConfig()


def term_weights(terms: Mapping[str, RewardTerm], field: str) -> dict[str, RunSchedule]:
    """Returns the weights of the terms, by name; `field` is the name of the field with the terms. Raises `ConfigError`
    for a weight that can't be read, or that depends on more than the run's progress."""
    weights: dict[str, RunSchedule] = {}
    for name, term in terms.items():
        where = f"{field}.{name}.weight"
        weights[name] = parse(term.weight, where, per_prompt=False)
        if not isinstance(weights[name], Ramp | Phases):
            raise ConfigError(f"{where} is {term.weight!r}; it must be a constant, linear, cosine or phases")
    return weights


@dataclasses.dataclass(slots=True)
class EnvironmentLimits(Section):
    """The bounds of environments. What exceeds a bound fails its episode."""

    concurrency: int = positive(8)  # environments at once, each in its process; further episodes wait in order
    turns: int = positive(32)  # turns of an episode, which ends without a further one
    seconds: float = positive(60.0)  # seconds of a step, a snapshot, a restore
    start_seconds: float = positive(120.0)  # seconds of a reset, the environment's imports included
    memory_gib: float = positive(4.0)  # resident memory of a process and its descendants
    text_bytes: int = positive(1 << 20)  # of an observation's text in UTF-8, and of its `info` in JSON
    media: int = positive(16)  # images and videos of an observation
    pixels: int = positive(1 << 24)  # of an image or a frame
    frames: int = positive(1024)  # of a video
    encoded_bytes: int = positive(1 << 26)  # of an encoded medium, and of a snapshot


@dataclasses.dataclass(slots=True)
class SourceConfig(Section):
    """A source of training prompts: its file, its reward, and how often prompts are drawn from it."""

    # A .jsonl manifest, a .parquet file or a folder of .parquet files, by path or URL (s3://, https://, ...). Empty:
    # the embedded data set of the source's name.
    path: str = ""
    eval_path: str = ""  # held-out records, in the same format
    weight: float = positive(1.0)  # how often prompts are drawn from this source, relative to others
    reward: str = "exact"  # a name in `fluxjax.rewards`, or module:attribute
    # Several rewards in the place of `reward`, by name. Their weighted sum counts.
    rewards: dict[str, RewardTerm] = dataclasses.field(default_factory=dict, metadata={"entries": RewardTerm})
    eval_reward: str = ""  # the reward of held-out prompts, named as `reward`; empty: the same as in training
    # Names of the file's columns for prompt, answer, images, videos, id. The usual names are recognised
    # (`fluxjax.data.sources.ALIASES`).
    columns: dict[str, str] = dataclasses.field(
        default_factory=dict,
        metadata={
            "holds": lambda value: set(value) <= set(COLUMNS) and all(isinstance(name, str) for name in value.values()),
            "allowed": f"have only the keys {', '.join(COLUMNS)}, each with the name of a field",
        },
    )
    # The environment that answers the turns of a response, as a name in `fluxjax.environments` or as module:attribute.
    # Empty: a response is one turn.
    environment: str = ""
    environment_arguments: dict[str, object] = dataclasses.field(  # its keyword arguments
        default_factory=dict, metadata={"nested": True}
    )
    # A turn sees, behind the prompt, the `whole` episode; only the newest observation (`turn`); or all texts, but only
    # the newest K images and videos of observations (`images:K`).
    context: str = bounded(
        WHOLE, lambda rule: CONTEXT.fullmatch(rule) is not None, "be whole, turn or images:K with K of at least 1"
    )

    @property
    def reward_names(self) -> str:
        """The names of the source's rewards, for messages."""
        return " + ".join(self._rewards)

    @property
    def _rewards(self) -> list[str]:
        return [term.reward or name for name, term in self.rewards.items()] or [self.reward]

    def validate_rewards(self, field: str) -> None:
        """Raises `ConfigError` for rewards that exclude each other, for weights that can't be read, and for what only a
        source with an environment has."""
        needing = {
            "environment_arguments are": self.environment_arguments,
            "reward 'environment' is": "environment" in self._rewards,
            f"context {self.context!r} is": self.context != WHOLE,
        }
        if not self.environment and (what := next((what for what, given in needing.items() if given), "")):
            raise ConfigError(f"{field}.{what} given, but {field}.environment is empty; name the environment there")
        if self.rewards and self.reward != type(self)().reward:
            raise ConfigError(
                f"{field}.reward is {self.reward!r}, but {field}.rewards replaces it; name it in {field}.rewards"
            )
        term_weights(self.rewards, f"{field}.rewards")


@dataclasses.dataclass(slots=True)
class DataConfig(Section):
    sources: dict[str, SourceConfig] = dataclasses.field(default_factory=dict, metadata={"entries": SourceConfig})
    environments: EnvironmentLimits = dataclasses.field(default_factory=EnvironmentLimits)
    max_pixels: int = not_negative(0)  # the most pixels of an image or a frame; 0: as in the checkpoint
    video_frames: int = positive(4)  # frames sampled from a video
    chat_template: bool = False  # render prompts with the checkpoint's chat template, else plain text
    preprocessors: int = not_negative(0)  # preprocessors of each trainer process; 0: trainer processes decode media
    # Processes that decode for a preprocessor (0: as many as its share of the cores), or for a run without
    # preprocessors (0: the run's threads decode). A process that takes too long or too much memory for a file is
    # killed. A script that trains with workers needs `if __name__ == "__main__":`, since each process imports the
    # script.
    workers: int = not_negative(0)
    cache_gib: float = positive(4.0)  # GiB of decoded media, in each preprocessor or in a run without preprocessors
    # GiB of decoded media that each process of a run with preprocessors keeps: at most half for prompts of the next two
    # steps, the rest for prompts whose responses will be trained on. 0: none.
    near_gib: float = not_negative(0.0)

    @property
    def has_environments(self) -> bool:
        return any(source.environment for source in self.sources.values())
