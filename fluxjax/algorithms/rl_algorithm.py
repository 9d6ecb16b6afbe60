"""The extension point: an algorithm's methods, the built-in algorithms by name, and the search for a run's algorithm.

`advantages` runs on the host over scored groups, `token_loss` inside `jit` over a packed batch. The batch's loss
weights contain the normalisation (by tokens, sequences or a constant), so a step's loss is
`sum(loss_weights_BT * token_loss_BT)` for every algorithm.
"""

import functools
import hashlib
import importlib
import inspect
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxtyping import Array, Float

from sharding.door import ByName

from ..base.import_path import imported
from ..base.types import Group, TrainBatch
from ..config import AlgorithmConfig, ConfigError

Key: TypeAlias = tuple[int, int]  # (draw, sample) of a response
TokenValues: TypeAlias = Float[Array, "B T"]
LossAndMetrics: TypeAlias = tuple[TokenValues, dict[str, TokenValues]]  # the loss of each token; metrics by name

_REQUIRED = ("advantages", "token_loss")


class RLAlgorithm:
    """The base of all algorithms. An algorithm must define `advantages` and `token_loss`. The other members say what
    the trainer may leave out or must compute."""

    # True: advantages depend on all groups of a step, so they are computed only when the step is complete.
    whole_step = False
    response_ratios = False  # True: the loss reads `policy_log_ratios_BT`, from a forward pass before each update
    coupled = False  # True: the loss joins several responses; before each update, `couple` returns its derivatives
    critic = False  # True: `advantages` returns the reward of a response (`fluxjax.algorithms.ppo`)

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """Returns the groups with advantages (`Group.with_advantages`, `Group.with_turn_advantages`)."""
        raise NotImplementedError

    def token_loss(
        self, logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
    ) -> LossAndMetrics:
        """Returns the loss of each token, and named per-token metrics. The values of tokens whose loss weight is 0 are
        ignored. A metric of the step is the mean of its values over the trained tokens (`loss_weights_BT != 0`). The
        learner adds metrics of all algorithms: the entropy, and the gap of the engine's and the trainer's log-probs."""
        raise NotImplementedError

    def couple(
        self, groups: Sequence[Group], log_ratios: Mapping[Key, float], cfg: AlgorithmConfig
    ) -> tuple[Mapping[Key, float], Mapping[str, float]]:
        """Returns (the derivatives of a `coupled` algorithm's loss by the log-probability of each response, metrics),
        for an optimizer step. The metric `loss` is the value of the loss.

        `groups` have the advantages that `advantages` gave them. `log_ratios` are `log(policy / reference)` in nats,
        summed over the tokens of a response. `log_ratios` has no entry for a response without a token, and none for a
        response of advantage 0 whose group has advantages that are not 0. The advantages that `token_loss` gets are the
        derivatives, negated and divided by the loss weights.
        """
        raise NotImplementedError

    def idle_without_advantage(self, cfg: AlgorithmConfig) -> bool:
        """Says whether groups whose advantages are all 0 have no gradient, so that they need not be computed."""
        return False


def adapted(implementation: Any, field: str) -> RLAlgorithm:
    """Returns an algorithm from a class (called without arguments), an object or a module. What has only
    `compute_loss(batch, weights_BT)` becomes a `ShortForm`. Raises `ConfigError`, naming the configuration's `field`,
    for anything that lacks the functions of an algorithm."""
    if isinstance(implementation, type):
        try:
            implementation = implementation()
        except Exception as error:  # whatever the user's constructor raises
            raise ConfigError(
                f"{field}: {implementation.__name__}() raised {type(error).__name__}: {error}; a class is called "
                "without arguments, so name an object of the class instead"
            ) from error
    own_loss = getattr(implementation, "token_loss", RLAlgorithm.token_loss)
    inherited = getattr(own_loss, "__func__", own_loss) is RLAlgorithm.token_loss
    if inherited and callable(getattr(implementation, "compute_loss", None)):
        return importlib.import_module(".short_form", __package__).ShortForm(implementation)
    required = (*_REQUIRED, "couple") if getattr(implementation, "coupled", False) else _REQUIRED
    for name in required:
        method = getattr(type(implementation), name, None)
        if not callable(getattr(implementation, name, None)) or method is getattr(RLAlgorithm, name):
            raise ConfigError(
                f"{field} is an algorithm without {name}(): {implementation!r}; it needs {' and '.join(required)}, as "
                "in fluxjax.algorithms.rl_algorithm"
            )
    if isinstance(implementation, RLAlgorithm):
        return implementation
    algorithm = RLAlgorithm()  # for any object with the two functions, such as a module
    members = [name for name in vars(RLAlgorithm) if not name.startswith("_") and hasattr(implementation, name)]
    vars(algorithm).update({name: getattr(implementation, name) for name in members})
    return algorithm


ALGORITHMS: Mapping[str, RLAlgorithm] = ByName(
    __name__,
    {
        "grpo": "grpo:GRPO",
        "dr_grpo": "grpo:GRPO",
        "dapo": "grpo:GRPO",
        "gspo": "gspo:GSPO",
        "cispo": "cispo:CISPO",
        "rloo": "rloo:RLOO",
        "gigpo": "gigpo:GiGPO",
        "reinforce_plus_plus": "reinforce_plus_plus:ReinforcePlusPlus",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus:ReinforcePlusPlusBaseline",
        "ppo": "ppo:PPO",
        "distillation": "distillation:Distillation",
        "dpo": "dpo:DPO",
        "sft": "sft",
    },
    adapted,
)


def find_algorithm(cfg: AlgorithmConfig) -> RLAlgorithm:
    """Returns the algorithm that `cfg.name` gives as an object, as a name in `ALGORITHMS`, or as an import path
    `module:attribute`. Raises `ConfigError`, naming the field, if there is no such algorithm."""
    if not isinstance(cfg.name, str):
        return adapted(cfg.name, "algorithm.name")
    if cfg.name in ALGORITHMS:
        return ALGORITHMS[cfg.name]
    cfg.validate()
    found = imported(
        cfg.name, "algorithm.name", lambda value: hasattr(value, "token_loss") or hasattr(value, "compute_loss")
    )
    return adapted(found, f"algorithm.name={cfg.name}")


def own_code(cfg: AlgorithmConfig) -> str:
    """Returns the digest of the file that defines a user's algorithm; empty for built-in algorithms, and for code
    without a file. The digest does not cover modules that the file imports."""
    if cfg.built_in:
        return ""
    named = importlib.import_module(cfg.name.partition(":")[0]) if isinstance(cfg.name, str) else cfg.name
    try:
        file = inspect.getsourcefile(named if hasattr(named, "__name__") else type(named))
    except TypeError:  # the class has no source file, as in a notebook
        return ""
    return _digest(file) if file else ""


@functools.cache
def _digest(file: str) -> str:
    path = pathlib.Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
