"""The arrays that decide the rest of a run: those of a checkpoint, and of a snapshot."""

from __future__ import annotations

from typing import Any

from sharding.walk import Params
from sharding.weights import like

from ..config import Config
from ..learner.critic import Critic
from ..learner.learner import Learner


def arrays_of(learner: Learner, reference: Params | None, critic: Critic | None = None) -> dict[str, Any]:
    """Returns the arrays of the learner, the reference and the critic, by name. `reference` are the frozen parameters,
    if there is a KL term; weights that it shares with the learner are left out. `critic` is that of algorithms that
    have one."""
    arrays: dict[str, Any] = {"learner": learner.state()}
    if critic is not None:
        arrays["critic"] = critic.state()
    if reference is None:
        return arrays
    return arrays | {"reference": reference if learner.config.algorithm.reference else learner.trained(reference)}


def reference_of(learner: Learner, arrays: dict[str, Any]) -> Params | None:
    """Returns the reference out of `arrays_of`, for a learner that has loaded its own part of the arrays."""
    reference: Params | None = arrays.get("reference")
    return reference if reference is None or learner.config.algorithm.reference else learner.with_trained(reference)


def abstract_arrays(learner: Learner, config: Config, critic: Critic | None = None) -> dict[str, Any]:
    """Returns the shapes and shardings of what `arrays_of` returns in the midst of RL, without numbers."""
    return like(arrays_of(learner, learner.params if config.algorithm.kl_coefficient else None, critic))
