"""The settings of LoRA (arXiv:2106.09685): adapters are trained in the place of weights."""

import dataclasses

from ..base.errors import ConfigError
from .bounds import not_negative, positive

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(slots=True)
class LoraConfig:
    """Adapters beside projections of the language model's layers; all other weights stay as they are."""

    rank: int = not_negative(0)  # numbers between the two matrices of an adapter; 0: off, all weights are trained
    alpha: float = positive(32.0)  # the product of the two counts alpha / rank times
    targets: tuple[str, ...] = TARGETS  # projections that have adapters, by their names in Hugging Face's models
    adapter: str = ""  # a folder of PEFT whose adapters are trained further; empty: new ones

    def validate(self) -> None:
        """Raises `ConfigError` for projections that no layer has."""
        if wrong := [name for name in self.targets if name not in TARGETS]:
            raise ConfigError(f"lora.targets has {', '.join(map(repr, wrong))}; it may have {', '.join(TARGETS)}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"lora.targets is {self.targets}; it must name each projection once, and one at least")
