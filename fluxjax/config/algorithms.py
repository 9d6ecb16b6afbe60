"""The section of `Config` that says what is learned from rewards: the algorithm, its settings, and its own defaults.

`OWN_SETTINGS` has the settings in which an algorithm's paper differs from the defaults here. They are taken over where
the name is chosen, on the command line (`--config.algorithm.name=dr_grpo`) or by `AlgorithmConfig.of("dr_grpo")`; what
else is given there counts more. So a run's settings always say what is computed, and nothing means "as the algorithm
likes".
"""

import copy
import dataclasses
import difflib
import enum
from collections.abc import Mapping
from typing import Any

from ..base.errors import ConfigError
from .bounds import bounded, label, not_negative, positive, within
from .scheduling import ImportanceConfig

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LossAggregation(enum.Enum):
    TOKEN_MEAN = "token_mean"  # every token of the step counts the same (DAPO)
    SEQUENCE_MEAN = "sequence_mean"  # every response counts the same, its tokens share that (GRPO)
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
    "reinforce_plus_plus": {"kl_coefficient": 0.01, "kl_estimator": KlEstimator.K1, "kl_in_reward": True},
    "reinforce_plus_plus_baseline": {"kl_coefficient": 0.01, "kl_estimator": KlEstimator.K2},
    "ppo": {},
    "distillation": {"kl_coefficient": 1.0},
    "dpo": {"kl_coefficient": 0.1},
    "sft": {},
}
# They compare the responses of a group:
_RELATIVE = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline", "dpo")


@dataclasses.dataclass(slots=True)
class AlgorithmConfig:
    # A built-in algorithm, whose own settings come along, or one of your own: module:attribute, which leads to a class,
    # an object, or a module of the two functions that `fluxjax.algorithms.rl_algorithm` names. In Python also the
    # object itself: it is never copied, and a run's folder has the name of its class only.
    name: Any = dataclasses.field(default="grpo", metadata={"object": True})
    normalize_std: bool = True  # divide advantages by the group's standard deviation; False as in Dr.GRPO
    clip_low: float = not_negative(0.2)  # ratios below 1 less this are clipped
    clip_high: float = not_negative(0.2)  # larger than clip_low: clip-higher (DAPO)
    dual_clip: float = bounded(  # the loss of a token with a negative advantage grows up to this ratio; 0: without end
        3.0, lambda value: value == 0 or value > 1, "be 0 or above 1: below, it would cut off every token"
    )
    # Optimizer steps of a training step: one for each of its minibatches of whole prompts, all that so many times.
    minibatches: int = positive(1)  # optimizer steps into which the prompts of a training step are dealt
    epochs: int = positive(1)  # times that a training step goes through its minibatches
    entropy_coefficient: float = not_negative(0.0)  # > 0 rewards undecided next-token distributions
    kl_coefficient: float = not_negative(0.0)  # > 0 keeps a frozen reference model
    kl_estimator: KlEstimator = KlEstimator.K3  # of the KL from the reference
    kl_in_reward: bool = False  # kl_coefficient * the KL of a response is taken off its reward; else it is in the loss
    reference: str = ""  # a local checkpoint folder of the model's sizes; empty: the model as RL begins
    reference_every: int = not_negative(0)  # steps after which the reference becomes the policy of then; 0: never
    loss_aggregation: LossAggregation = LossAggregation.TOKEN_MEAN  # what counts the same in the loss
    importance: ImportanceConfig = dataclasses.field(default_factory=ImportanceConfig)

    @classmethod
    def of(cls, name: str, **settings: Any) -> "AlgorithmConfig":
        """Returns the algorithm's own settings, and on top of them those that are given."""
        return cls(**{"name": name, **OWN_SETTINGS.get(name, {}), **settings})

    def choose(self, name: str) -> None:
        """Takes the algorithm's own settings over, and those of the one before back; other fields stay."""
        fresh = AlgorithmConfig()
        for field, value in OWN_SETTINGS.get(self.label, {}).items():
            if getattr(self, field) == value:
                setattr(self, field, getattr(fresh, field))
        self.name = name
        for field, value in OWN_SETTINGS.get(name, {}).items():
            setattr(self, field, value)

    def renews_reference(self, version: int) -> bool:
        """Says whether the weights of this version, just trained, become the reference."""
        return self.kl_coefficient > 0 and self.reference_every > 0 and version % self.reference_every == 0

    @property
    def relative(self) -> bool:
        """Says whether a built-in algorithm compares the responses of a group, which then needs two at least."""
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
        """The algorithm in words: its name, or `module:Class` of an object."""
        return label(self.name)

    def validate(self) -> None:
        """Raises `ConfigError` for an algorithm that RL can't have. No import path is imported yet."""
        if self.kl_in_reward and not self.kl_coefficient:
            raise ConfigError("algorithm.kl_in_reward needs algorithm.kl_coefficient above 0, not 0.0")
        name = self.label
        if name == "distillation" and not self.kl_coefficient:
            raise ConfigError("algorithm.name is distillation; its teacher needs algorithm.kl_coefficient above 0")
        if name == "distillation" and not self.reference:
            raise ConfigError("algorithm.name is distillation; algorithm.reference must be the folder of its teacher")
        if name == "dpo" and (self.kl_in_reward or not self.kl_coefficient):
            raise ConfigError(
                "algorithm.name is dpo; its beta is algorithm.kl_coefficient, which must be above 0, with kl_in_reward "
                "off"
            )
        if not isinstance(self.name, str):
            return
        names = [known for known in OWN_SETTINGS if known != "sft"]
        if name == "sft":
            raise ConfigError(
                f"algorithm.name is sft; it serves the warm start (warm_start.steps), RL needs {', '.join(names)}"
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
class CriticConfig:
    """The settings of the critic that some algorithms have (PPO): its training, and advantages from its values."""

    # Its other settings are optim's, its minibatches and epochs algorithm's.
    lr: float = positive(1e-3)  # of the critic's own optimizer; for large models ten times the policy's, as a rule
    # Steps in which only the critic learns: the policy, and the schedule of its learning rate, begin after them.
    warmup_steps: int = not_negative(0)
    gae_lambda: float = within(0.95, "[0, 1]")  # 1: advantages from whole returns; 0: from the next token's value


@dataclasses.dataclass(slots=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): adapters beside projections of the language model's layers are trained, and all other
    weights stay as they are."""

    rank: int = not_negative(0)  # numbers between the two matrices of an adapter; 0: off, all weights are trained
    alpha: float = positive(32.0)  # the product of the two counts alpha / rank times
    targets: tuple[str, ...] = LORA_TARGETS  # projections that have adapters, by their names in Hugging Face's models
    adapter: str = ""  # a folder of PEFT whose adapters are trained further; empty: new ones

    def validate(self) -> None:
        """Raises `ConfigError` for projections that no layer has."""
        if wrong := [name for name in self.targets if name not in LORA_TARGETS]:
            raise ConfigError(f"lora.targets has {', '.join(map(repr, wrong))}; it may have {', '.join(LORA_TARGETS)}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"lora.targets is {self.targets}; it must name each projection once, and one at least")
