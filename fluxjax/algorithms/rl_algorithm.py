"""The extension point: what the trainer asks of an algorithm.

`advantages` runs on the host over scored groups, `token_loss` inside `jit` over a packed batch. Everything in between
(normalising by tokens, sequences or a constant) is in the batch's loss weights, so a step's loss is
`sum(loss_weights_BT * token_loss_BT)` for every algorithm.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxtyping import Array, Float

from ..base.types import Group, TrainBatch
from ..config import AlgorithmConfig, ConfigError

Key: TypeAlias = tuple[int, int]  # (draw, sample) of a response

_REQUIRED = ("advantages", "token_loss")


class RLAlgorithm:
    """Base of all algorithms. The two functions must be written; the rest says what the trainer may leave out, and what
    it must bring, and has defaults that are right for any algorithm."""

    whole_step = False  # advantages depend on all groups of a step, so that none can be computed before it is complete
    response_ratios = False  # the loss reads `TrainBatch.policy_log_ratios_BT`: a forward pass before each update
    coupled = False  # the loss is one of several responses together, and `couple` has its slopes before each update
    critic = False  # what `advantages` returns is the reward of a response's last token; see `fluxjax.algorithms.ppo`

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """The same groups with `Sample.advantage` filled in, from their rewards alone."""
        raise NotImplementedError

    def token_loss(
        self,
        logprobs_BT: Float[Array, "B T"],
        entropies_BT: Float[Array, "B T"],
        batch: TrainBatch,
        cfg: AlgorithmConfig,
    ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
        """The loss of each token, and named per-token metrics; both are 0 where the loss weight is 0.

        A metric of the step is the mean of its values over the trained tokens (`loss_weights_BT != 0`). The learner
        adds what is the same for all: entropy, and the gap between the engine's log-probs and the trainer's.
        """
        raise NotImplementedError

    def couple(
        self, groups: Sequence[Group], log_ratios: Mapping[Key, float], cfg: AlgorithmConfig
    ) -> tuple[Mapping[Key, float], Mapping[str, float]]:
        """What the loss of an optimizer step is, where it is `coupled`: its derivatives with respect to the
        log-probability of each response, and metrics, its value among them as `loss`.

        `groups` have the advantages that `advantages` gave them, and `log_ratios` are `log(policy / reference)` in
        nats, summed over the tokens of a response; those without a token, and those whose advantage is 0 in a group
        where another's is not, are not in it. The derivatives come to `token_loss` as advantages: minus them, and
        divided by the loss weights.
        """
        raise NotImplementedError

    def idle_without_advantage(self, cfg: AlgorithmConfig) -> bool:
        """Says whether groups whose advantages are all 0 have no gradient, so that they need not be computed."""
        return False


class _Adapted(RLAlgorithm):
    """Something else with the two functions, such as a module."""

    def __init__(self, functions: Any) -> None:
        self.advantages: Callable[..., Any] = functions.advantages
        self.token_loss: Callable[..., Any] = functions.token_loss


def adapted(implementation: Any, field: str) -> RLAlgorithm:
    """Returns an algorithm for a class (called without arguments), an object or a module. Raises `ConfigError`, naming
    the `field` that it is of, for what is none."""
    if isinstance(implementation, type):
        try:
            implementation = implementation()
        except Exception as error:  # whatever the user's constructor raises
            raise ConfigError(
                f"{field}: {implementation.__name__}() raised {type(error).__name__}: {error}; a class is called "
                "without arguments, so name an object of it instead"
            ) from error
    required = (*_REQUIRED, "couple") if getattr(implementation, "coupled", False) else _REQUIRED
    for name in required:
        own = getattr(type(implementation), name, None)
        if not callable(getattr(implementation, name, None)) or own is getattr(RLAlgorithm, name):
            raise ConfigError(
                f"{field} is an algorithm without {name}(): {implementation!r}; it needs {' and '.join(required)}, as "
                "in fluxjax.algorithms.rl_algorithm"
            )
    return implementation if isinstance(implementation, RLAlgorithm) else _Adapted(implementation)
