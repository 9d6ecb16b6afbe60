"""The same steps of training in one process and in several: every strategy, all that a loss may read."""

import jax
import numpy as np
from learner_cases import tiny
from packing_cases import MODEL, make_config

from fluxjax.algorithms import ALGORITHMS
from fluxjax.batch.composer import Composer
from fluxjax.batch.composition import unpack
from fluxjax.config import Config, ImportanceLevel, Strategy
from fluxjax.learner.learner import Learner
from fluxjax.learner.scoring import with_scores

DEVICES = 4
HEADS = (4, 2)
ALGORITHM = ALGORITHMS["grpo"]
STRATEGIES = ["fsdp", "ulysses", "flex_ulysses", "odc", "hybrid"]
SEEDS = [4, 11]  # odc: a microbatch of all devices; devices of a process that have none


def settings(strategy: str, processes: int) -> Config:
    """A loss with a reference and importance weights of whole responses."""
    own_pace = strategy in ("odc", "hybrid")
    config = make_config(tokens_per_row=48 if own_pace else 72, rows=1 if own_pace else 2)
    config.sharding.strategy = Strategy.ODC if own_pace else Strategy(strategy)
    config.sharding.hybrid = strategy == "hybrid"
    config.sharding.deterministic = strategy == "odc"
    config.sharding.live_layers = 2 if strategy == "hybrid" else 3
    config.sharding.devices_per_host = DEVICES // processes
    config.algorithm.kl_coefficient = 0.1
    config.algorithm.importance.level = ImportanceLevel.SEQUENCE
    config.optim.lr = 1e-3
    return config


def composer(config: Config) -> Composer:
    return Composer(config, DEVICES, MODEL.vision, tiny(HEADS).config.text)


class Recorded:
    """A learner, and the groups of each seed as it learns from them; `compositions` are those of each seed."""

    def __init__(self, config: Config, compositions, mesh=None, links=None) -> None:
        self.config, self.compositions = config, compositions
        self.learner = Learner(config, tiny(HEADS), ALGORITHM.token_loss, mesh=mesh, links=links)
        self._reference = jax.tree.map(lambda weight: weight * np.float32(0.9), self.learner.params)

    def composition(self, seed: int):
        """With what the loss reads beside the pass itself."""
        learner = self.learner
        weights = learner.params, self._reference
        [scored] = with_scores([self.compositions[seed]], learner.gradients, *weights, self.config, ALGORITHM)
        return scored

    def losses(self, steps: int) -> list[float]:
        """Those of so many steps, over all seeds in turn."""
        chosen = (SEEDS[step % len(SEEDS)] for step in range(steps))
        return [self.learner.step(self.composition(seed).everywhere)["loss"] for seed in chosen]


def scores(composition) -> dict[tuple[int, int], np.ndarray]:
    """What the loss read of the reference, then the log-ratio of the response, of each response's tokens here."""
    names = ("reference_logprobs_BT", "response_log_ratios_BT")
    found = [unpack(composition, [getattr(batch, name) for batch in composition.batches]) for name in names]
    return {key: np.concatenate([one[key] for one in found]) for key in found[0] if key[0] >= 0}
