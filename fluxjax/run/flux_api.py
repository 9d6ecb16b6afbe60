"""Flux's API as published (its section "API Design"), in terms of this project.

    from fluxjax import FluxConfig, FluxTrainer, RewardConfig, RewardFunction

    class Short(RewardFunction):
        def compute(self, prompts, responses):
            return [1.0 - len(text) / 500 for text in responses]

    config = FluxConfig(reward=RewardConfig(impl=Short()), steps=100)
    config.data.sources = {"mine": SourceConfig(...)}
    FluxTrainer(config).fit(["Tell a joke.", "Tell another one."])

Importing this module loads no JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..base.errors import ConfigError
from ..config import Config

_HERE = {  # published fields of `FluxConfig`, and where they are here
    "learning_rate": "optim.lr",
    "batch_size": "rollout.prompts_per_step",
    "gradient_accumulation_steps": "packing (microbatches follow from the rows that fit)",
    "max_grad_norm": "optim.max_grad_norm",
    "log_interval": "nothing: every step is logged",
    "wandb_project": "report (TensorBoard, metrics.jsonl, Prometheus)",
    "megatron": "sharding",
    "sglang": "servers",
    "adaptive_async": "policy (AdaptiveAsyncConfig)",
    "batch_composer": "policy.prefer",
}


class RewardFunction:
    """The base of a reward for batches of responses. A subclass defines `compute`, which gets texts. (A reward without
    this base gets `Prompt` objects, which have the reference answer and the media, too.)"""

    def compute(self, prompts: Sequence[str], responses: Sequence[str]) -> Sequence[float]:
        """Returns the reward of each response. The base has no reward of its own, and names what is missing."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(prompts, responses)")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "compute" in vars(cls):
            cls.compute = _of_texts(cls.compute)  # type: ignore[method-assign]


def _of_texts(compute: Callable[..., Sequence[float]]) -> Callable[..., Sequence[float]]:
    @functools.wraps(compute)
    def of_texts(self: RewardFunction, prompts: Sequence[Any], responses: Sequence[str]) -> Sequence[float]:
        return compute(self, [getattr(prompt, "text", prompt) for prompt in prompts], responses)

    return of_texts


@dataclasses.dataclass
class RewardConfig:
    """A reward, as an object, for all sources of a run: any reward of `FluxTrainer(rewards=...)`."""

    impl: Any


class FluxConfig(Config):
    """A `Config` whose settings may be given by name, and whose `reward` may be an object. Raises `ConfigError` for
    published fields that have another name here, and for unknown ones."""

    def __init__(self, *, reward: RewardConfig | None = None, **settings: Any) -> None:
        known = {field.name for field in dataclasses.fields(Config)}
        for name in settings.keys() - known:
            there = f"it is {_HERE[name]} here" if name in _HERE else f"it has {', '.join(sorted(known))}"
            raise ConfigError(f"FluxConfig has no {name}: {there}")
        if reward is not None and not isinstance(reward, RewardConfig):
            raise ConfigError(f"FluxConfig: reward is {type(reward).__name__}; use RewardConfig(impl=...)")
        super().__init__(**settings)
        self.reward = reward
