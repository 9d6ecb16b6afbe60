"""The sections of `Config` about learning: scheduling policies, corrections and replay, the algorithm with its critic,
and adapters.

Numbers that may change during a run may be schedules, written as text: see `fluxjax.config.schedules`.

`OWN_SETTINGS` has the settings in which an algorithm's paper differs from the defaults here. Choosing an algorithm sets
its settings, by `--config.algorithm.name=dr_grpo` or by `AlgorithmConfig.of("dr_grpo")`. Settings that are given beside
the name overrule an algorithm's own settings.
"""

import copy
import dataclasses
import difflib
import enum
from collections.abc import Mapping
from typing import Any

from ..base.errors import ConfigError
from .bounds import Chosen, Section, bounded, label, not_negative, pair, positive, power_of_two, scheduled, within

MAX_DEGREE = 8  # the most devices of an engine; all of them are on one host
PREFERENCES = ("stalest", "stratify", "curriculum", "diversity", "lengths")
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA_TARGETS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")  # of layers with Gated DeltaNet


class DynamicSampling(enum.Enum):
    """The field of `Reward` by which dynamic sampling compares the responses of a group."""

    OFF = "off"  # groups of equal rewards are trained on, too
    CORRECT = "correct"  # whether the response is correct, whatever its reward, as in DAPO and verl; also written true
    VALUE = "value"  # the shaped reward

    def __bool__(self) -> bool:
        return self is not DynamicSampling.OFF

    @classmethod
    def _missing_(cls, value: object) -> "DynamicSampling | None":
        return {"true": cls.CORRECT, "false": cls.OFF}.get(str(value))


class Importance(enum.Enum):
    """Ways to keep the ratios policy / behaviour from growing (`fluxjax.algorithms.loss`)."""

    NONE = "none"  # ratios may grow
    TRUNCATE = "truncate"  # ratios are cut to the larger of `bounds` (TIS)
    MASK = "mask"  # tokens outside of `bounds` do not count (IcePop)


class ImportanceLevel(enum.Enum):
    TOKEN = "token"
    SEQUENCE = "sequence"  # the mean log-ratio of a response, for all of its tokens (geometric mean)


class PolicyConfig(Chosen):
    """The base of the sections of scheduling policies."""

    __slots__ = ()

    @property
    def staleness_limit(self) -> int | None:
        """The most versions that a trained token may be behind; None: the scheduling policy sets no bound."""
        return getattr(self, "max_staleness", None)


@dataclasses.dataclass(slots=True)
class SynchronousConfig(PolicyConfig):
    """Generation and training take turns, strictly on-policy."""


@dataclasses.dataclass(slots=True)
class TailBatchingConfig(PolicyConfig):
    """Prompts with long answers wait for rounds in which no response is cut off. With the defaults, runs learned as
    well as with synchronous training; the values of Flexes are 1.25, 1.25 and 0 (`docs/log.md`)."""

    prompts: float | str = scheduled(2.0, "[1, 8]")  # prompts launched in short rounds for each prompt of a step
    responses: float | str = scheduled(1.0, "[1, 8]")  # responses launched in short rounds for each response of a group
    # Versions that a long round's groups may be behind: max_staleness + 1 steps share these groups.
    max_staleness: int = not_negative(1)

    @property
    def staleness_limit(self) -> int | None:
        return self.max_staleness or None


@dataclasses.dataclass(slots=True)
class AprilConfig(PolicyConfig):
    """More prompts than needed are under way; unfinished responses go on in the next round."""

    oversample: float = within(1.5, "[1, 8]")  # prompts under way for each prompt that a step needs
    max_staleness: int = not_negative(4)  # versions; a group that began earlier loses its tokens and starts afresh


@dataclasses.dataclass(slots=True)
class AdaptiveAsyncConfig(PolicyConfig):
    """Generation runs ahead of training, as far as staleness allows (Flux, component 1)."""

    max_staleness: int = not_negative(4)  # versions; older tokens are never trained on
    # The staleness, in [0, 1], that training is steered to (`staleness` in
    # `fluxjax.coordinator.policies.adaptive_async`). A number or a schedule.
    target_staleness: float | str = scheduled(0.15, "[0, 1]")
    # The share of max_staleness by which generation runs ahead when the run begins. The share adapts later, unless it
    # is 0 (always synchronous) or 1 (always all of max_staleness).
    ratio: float = within(0.5, "[0, 1]")
    interrupt: bool = True  # engines get new weights at once, while responses go on; False: after all responses end
    # Preferences by which a step's groups are chosen among the scored groups (Flux, component 4): stalest (oldest
    # weights first), stratify (each staleness in proportion), curriculum (easy groups first, less and less), diversity
    # (sources and media kinds in proportion), lengths (similar lengths together).
    prefer: tuple[str, ...] = bounded(
        (), lambda value: set(value) <= set(PREFERENCES), f"have only names among {', '.join(PREFERENCES)}"
    )


Policy = SynchronousConfig | TailBatchingConfig | AprilConfig | AdaptiveAsyncConfig


@dataclasses.dataclass(slots=True)
class ParallelismConfig(Section):
    """Flexes, section 4.2: tensor parallelism of the engines."""

    degree: int = power_of_two(1)  # devices of an engine, at the start
    # The smallest degree that may be chosen: an engine's devices must have room for weights and a cache. The degree is
    # chosen anew each step, by the number of preemptions. 0: the degree stays.
    min_degree: int = power_of_two(0)
    profile: str = ""  # file of `python benchmarks/engine_profile.py`, for the first degree; empty: none

    @property
    def enabled(self) -> bool:
        """Returns True if the degree is chosen anew each step."""
        return self.min_degree > 0


@dataclasses.dataclass(slots=True)
class ImportanceConfig(Section):
    """Flux, component 3: one correction for staleness, mixed versions and replay."""

    kind: Importance = Importance.NONE  # way to keep ratios from growing: truncate or mask
    level: ImportanceLevel = ImportanceLevel.TOKEN  # ratio of a token, or of its response (all tokens scored first)
    # The smallest and the largest ratio that count: truncate cuts larger ratios, mask leaves out tokens outside.
    bounds: tuple[float, float] = pair((0.5, 2.0), "[0, 1)", "(1, inf)", "a ratio of 1 counts")
    decay: float = within(1.0, "(0, 1]")  # factor of a token's weight for each version that the token is behind; 1: off
    decoupled: bool = False  # clip around the policy at the start of the step instead of the behaviour policy
    normalize: bool = False  # divide weights by their mean over the step; scores all tokens before the step

    @property
    def whole(self) -> bool:
        """Returns True if a token's weight depends on other tokens, so that all tokens are scored before the step."""
        return self.level is ImportanceLevel.SEQUENCE or self.normalize


@dataclasses.dataclass(slots=True)
class ReplayConfig(Section):
    """Flux, component 3: groups that were trained on are trained on again (`fluxjax.learner.replay`)."""

    share: float = within(
        0.0, "[0, 1)", "only groups that are not replayed enter the replay buffer"
    )  # share of a step's groups; 0: no replay
    max_age: int = positive(4)  # versions that the oldest token of a group may be behind


class LossAggregation(enum.Enum):
    TOKEN_MEAN = "token_mean"  # every token of the step counts the same (DAPO)
    SEQUENCE_MEAN = "sequence_mean"  # every response counts the same, shared by its tokens (GRPO)
    CONSTANT = "constant"  # sum over tokens / (responses * max_new_tokens) (Dr.GRPO)


class KlEstimator(enum.Enum):
    """Estimators of KL(policy || reference) from one token (`fluxjax.algorithms.loss.kl_estimate`)."""

    K1 = "k1"  # the log-ratio itself: for kl_in_reward
    K2 = "k2"  # half its square
    K3 = "k3"  # unbiased and never negative (GRPO)


# Names of the built-in algorithms, each with its own settings: fields of `AlgorithmConfig`.
OWN_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"normalize_std": False, "loss_aggregation": LossAggregation.CONSTANT},
    "dapo": {"clip_high": 0.28, "loss_aggregation": LossAggregation.TOKEN_MEAN},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": LossAggregation.SEQUENCE_MEAN},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "loss_aggregation": LossAggregation.TOKEN_MEAN},
    "rloo": {"loss_aggregation": LossAggregation.CONSTANT},
    "gigpo": {"discount": 0.95},
    "reinforce_plus_plus": {"kl_coefficient": 0.01, "kl_estimator": KlEstimator.K1, "kl_in_reward": True},
    "reinforce_plus_plus_baseline": {"kl_coefficient": 0.01, "kl_estimator": KlEstimator.K2},
    "ppo": {},
    "distillation": {"kl_coefficient": 1.0},
    "dpo": {"kl_coefficient": 0.1},
    "sft": {},
}
# Algorithms that compare the responses of a group:
_RELATIVE = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "gigpo", "reinforce_plus_plus_baseline", "dpo")


@dataclasses.dataclass(slots=True)
class AlgorithmConfig(Section):
    # A built-in algorithm, chosen with its own settings, or module:attribute of your own algorithm. The attribute is a
    # class, an object, or a module with the two functions that `fluxjax.algorithms.rl_algorithm` names. In Python,
    # `name` may also be the object, which is never copied; a run's folder then has the name of the object's class.
    name: Any = dataclasses.field(default="grpo", metadata={"object": True})
    normalize_std: bool = True  # divide advantages by the group's standard deviation; False as in Dr.GRPO
    discount: float = within(1.0, "(0, 1]")  # factor of a reward for each turn that lies between (gigpo, ppo); 1: off
    clip_low: float = not_negative(0.2)  # ratios below 1 - clip_low are clipped
    clip_high: float = not_negative(0.2)  # ratios above 1 + clip_high are clipped; DAPO: higher than clip_low
    dual_clip: float = bounded(  # ratio up to which the loss of a token with a negative advantage grows; 0: without end
        3.0, lambda value: value == 0 or value > 1, "be 0 or above 1: a value in between would cut off every token"
    )
    # A training step makes minibatches * epochs optimizer steps; a prompt's responses stay in one minibatch.
    minibatches: int = positive(1)  # parts into which the prompts of a training step are dealt
    epochs: int = positive(1)  # times that a training step goes through its minibatches
    entropy_coefficient: float = not_negative(0.0)  # > 0 rewards next-token distributions of high entropy
    kl_coefficient: float = not_negative(0.0)  # > 0 keeps a frozen reference model
    kl_estimator: KlEstimator = KlEstimator.K3  # estimator of the KL from the reference
    kl_in_reward: bool = False  # a response's reward loses kl_coefficient * its KL; else the KL is in the loss
    reference: str = ""  # a local checkpoint folder of a model of the same sizes; empty: the model as RL begins
    reference_every: int = not_negative(0)  # steps after which the policy becomes the reference again; 0: never
    loss_aggregation: LossAggregation = LossAggregation.TOKEN_MEAN  # the weight of each token in the loss
    importance: ImportanceConfig = dataclasses.field(default_factory=ImportanceConfig)

    @classmethod
    def of(cls, name: str, **settings: Any) -> "AlgorithmConfig":
        """Returns the algorithm's own settings, overruled by `settings`."""
        return cls(**{"name": name, **OWN_SETTINGS.get(name, {}), **settings})

    def choose(self, name: str) -> None:
        """Sets the own settings of the algorithm `name`. The previous one's, unless changed, get their defaults."""
        fresh = AlgorithmConfig()
        for field, value in OWN_SETTINGS.get(self.label, {}).items():
            if getattr(self, field) == value:
                setattr(self, field, getattr(fresh, field))
        self.name = name
        for field, value in OWN_SETTINGS.get(name, {}).items():
            setattr(self, field, value)

    @property
    def relative(self) -> bool:
        """Returns True if the algorithm is built in and compares the responses of a group."""
        return self.label in _RELATIVE

    @property
    def updates(self) -> int:
        """The number of optimizer steps of a training step."""
        return self.minibatches * self.epochs

    @property
    def built_in(self) -> bool:
        return self.label in OWN_SETTINGS

    @property
    def label(self) -> str:
        """The algorithm's name, or `module:Class` of an object."""
        return label(self.name)

    def validate(self) -> None:
        """Raises `ConfigError` for a name that RL can't have and for settings that exclude each other."""
        if self.kl_in_reward and not self.kl_coefficient:
            raise ConfigError("algorithm.kl_in_reward needs algorithm.kl_coefficient above 0, not 0.0")
        name = self.label
        if name == "distillation" and not self.kl_coefficient:
            raise ConfigError("algorithm.name is distillation; its teacher needs algorithm.kl_coefficient above 0")
        if name == "distillation" and not self.reference:
            raise ConfigError("algorithm.name is distillation; algorithm.reference must be the folder of its teacher")
        if name == "gigpo" and self.kl_in_reward:
            raise ConfigError("algorithm.name is gigpo, whose rewards are of turns: set algorithm.kl_in_reward off")
        if name == "dpo" and (self.kl_in_reward or not self.kl_coefficient):
            raise ConfigError(
                "algorithm.name is dpo, whose beta is algorithm.kl_coefficient; set algorithm.kl_coefficient above 0, "
                "and algorithm.kl_in_reward off"
            )
        if not isinstance(self.name, str):
            return
        names = [known for known in OWN_SETTINGS if known != "sft"]
        if name == "sft":
            raise ConfigError(
                "algorithm.name is sft, which only serves the warm start (warm_start.steps); for RL, choose "
                f"{', '.join(names)}"
            )
        module, colon, attribute = name.partition(":")
        if name not in OWN_SETTINGS and not (colon and module and attribute):
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"algorithm.name is {name!r}; it must be one of {', '.join(names)}, or module:attribute{hint}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "AlgorithmConfig":
        return dataclasses.replace(self, importance=copy.deepcopy(self.importance, memo))


@dataclasses.dataclass(slots=True)
class CriticConfig(Section):
    """The settings of the critic that some algorithms have (PPO): its training, and advantages from its values."""

    # The critic takes its other settings from optim, and its minibatches and epochs from algorithm.
    lr: float = positive(1e-3)  # learning rate of the critic; for large models, as a rule, ten times the policy's
    # Steps in which only the critic learns; the policy, and the schedule of its learning rate, begin after these steps.
    warmup_steps: int = not_negative(0)
    gae_lambda: float = within(0.95, "[0, 1]")  # 1: advantages from complete returns; 0: from the next token's value


@dataclasses.dataclass(slots=True)
class LoraConfig(Section):
    """LoRA (arXiv:2106.09685): only adapters beside projections of the language model's layers are trained."""

    rank: int = not_negative(0)  # rank of an adapter's two matrices; 0: off, all weights are trained
    alpha: float = positive(32.0)  # the product of the two matrices counts alpha / rank times
    targets: tuple[str, ...] = bounded(  # projections with adapters, by their names in Hugging Face's models
        LORA_TARGETS,
        lambda value: value and set(value) <= {*LORA_TARGETS, *DELTA_TARGETS} and len(set(value)) == len(value),
        f"name some of {', '.join(LORA_TARGETS + DELTA_TARGETS)}, each once",
    )
    adapter: str = ""  # a folder of PEFT whose adapters are trained further; empty: new adapters
