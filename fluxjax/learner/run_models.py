"""The models that a run trains or compares with: policy, reference and critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

import models
from sharding.walk import Params
from sharding.weights import like, without_adapters

from ..algorithms import RLAlgorithm
from ..config import Config, ConfigError
from ..config.bounds import as_config_error
from .learner import Learner

if TYPE_CHECKING:
    from .critic import Critic


class RunModels:
    """The policy's learner, the frozen reference of a KL term, and the critic of an algorithm with a critic."""

    def __init__(
        self,
        config: Config,
        algorithm: RLAlgorithm,
        learner: Learner,
        critic: Critic | None = None,
        never_sampled: tuple[int, ...] = (),
        reference: Params | None = None,
    ) -> None:
        """`never_sampled` is that of `Learner`. `begin` and `load` set `reference` anew."""
        self._config, self.algorithm, self._never_sampled = config, algorithm, never_sampled
        self.learner, self.critic, self.reference = learner, critic, reference

    def begin(self, steps: int) -> None:
        """Begins RL of `steps` training steps with the present policy. Raises the errors of `first_reference`."""
        self._reset(steps)
        if self._config.algorithm.kl_coefficient:
            self.reference = first_reference(self._config, self.learner)
        if self.critic is not None:
            self.critic.begin(self.learner.weights(), steps)

    def _reset(self, steps: int) -> None:
        updates = self._config.policy_updates(steps)
        self.learner.reset(self.algorithm.token_loss, steps=updates, never_sampled=self._never_sampled)

    def renew_reference(self) -> bool:
        """Makes the policy the reference if the configuration says so for its version. Returns whether it did."""
        settings = self._config.algorithm
        every, version = settings.reference_every, self.learner.version
        renewed = settings.kl_coefficient > 0 and every > 0 and version % every == 0
        if renewed:
            self.reference = self.learner.params
        return renewed

    def arrays(self) -> dict[str, Any]:
        """Returns all arrays of a checkpoint. Weights that the reference shares with the policy are left out."""
        return self._arrays(self.reference)

    def abstract(self) -> PyTree:
        """Returns the shapes and shardings that `arrays` has during RL."""
        return like(self._arrays(self.learner.params if self._config.algorithm.kl_coefficient else None))

    def _arrays(self, reference: Params | None) -> dict[str, Any]:
        arrays: dict[str, Any] = {"learner": self.learner.state()}
        if self.critic is not None:
            arrays["critic"] = self.critic.state()
        if reference is not None:
            whole = bool(self._config.algorithm.reference)
            arrays["reference"] = reference if whole else self.learner.trained(reference)
        return arrays

    def forget(self) -> None:
        """Drops the present arrays, except for frozen weights beside adapters, so that no device holds two states
        during `load`. Arrays that an engine serves stay in memory."""
        self.reference = None
        self.learner.forget()
        if self.critic is not None:
            self.critic.forget()

    def load(self, arrays: dict[str, Any], steps: int) -> None:
        """Takes over `arrays` for `steps` training steps, and removes the learner's and the critic's from `arrays`."""
        self._reset(steps)
        self.learner.load_state(arrays.pop("learner"))
        if self.critic is not None:
            self.critic.restart(steps)
            self.critic.load_state(arrays.pop("critic"))
        self.reference = arrays.get("reference")
        if self.reference is not None and not self._config.algorithm.reference:
            self.reference = self.learner.with_trained(self.reference)

    def close(self) -> None:
        """Cancels compilations that have not begun, for learner and critic."""
        self.learner.gradients.close()
        if self.critic is not None:
            self.critic.gradients.close()


def first_reference(config: Config, learner: Learner) -> Params:
    """Returns the reference with which RL begins: the learner's weights, or those of `algorithm.reference`. Raises
    `ConfigError` for an unreadable checkpoint, or for weights of other sizes than the model's."""
    if not config.algorithm.reference:
        return learner.params
    with as_config_error("algorithm.reference", ValueError, OSError):
        reference = models.load(config.algorithm.reference, dtype=jnp.float32)
    weights = models.split(reference)[1], without_adapters(learner.params)
    sizes, wanted = (jax.tree.map(jnp.shape, params) for params in weights)
    if sizes != wanted:
        raise ConfigError(f"algorithm.reference: {config.algorithm.reference} has other sizes than the model")
    return learner.laid_out(reference)
