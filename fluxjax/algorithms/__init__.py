"""The algorithms by name. The trainer looks one up here and never asks which it got.

An algorithm is a module with two functions: `advantages` runs on the host over scored groups, `token_loss`
inside `jit` over a packed batch. Everything in between (normalising by tokens, sequences or a constant) is in
the batch's loss weights, so a step's loss is `sum(loss_weights_BT * token_loss_BT)` for every algorithm.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float

from ..base.types import Group, TrainBatch
from ..config import Algorithm, AlgorithmConfig
from . import grpo, sft


@runtime_checkable
class AlgorithmModule(Protocol):
    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """The same groups with `Sample.advantage` filled in, from their rewards alone."""
        ...

    def token_loss(
        self,
        logprobs_BT: Float[Array, "B T"],
        entropies_BT: Float[Array, "B T"],
        batch: TrainBatch,
        cfg: AlgorithmConfig,
    ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
        """The loss of each token, and named per-token metrics; both are 0 where the loss weight is 0.

        That of a built-in algorithm is proportional to the advantage, but for terms scaled by `kl_coefficient` and
        `entropy_coefficient`: where both are 0, groups without any advantage are not computed.

        A metric of the step is the mean of its values over the trained tokens (`loss_weights_BT != 0`). The learner
        adds what is the same for all: entropy, and the gap between the engine's log-probs and the trainer's.
        """
        ...


ALGORITHMS: dict[Algorithm, AlgorithmModule] = {Algorithm.GRPO: grpo, Algorithm.SFT: sft}

__all__ = ["ALGORITHMS", "AlgorithmModule"]
