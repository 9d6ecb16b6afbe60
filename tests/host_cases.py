"""The same steps of training in one process and in several: every strategy, all that a loss may read."""

import jax
import numpy as np
from learner_cases import random_groups, tiny
from packing_cases import MODEL, make_config

from fluxjax.algorithms import grpo
from fluxjax.batch.composer import Composer
from fluxjax.batch.composition import unpack
from fluxjax.config import Balance, Config, ImportanceLevel, Strategy
from fluxjax.learner.learner import Learner
from fluxjax.learner.policy_trainer import with_scores

DEVICES = 4
HEADS = (4, 2)
STRATEGIES = ["fsdp", "ulysses", "flex_ulysses", "odc", "hybrid"]


def settings(strategy: str, processes: int) -> Config:
    """A loss with a reference and importance weights of whole responses."""
    # Rows of 64 tokens, so that under odc some groups need several devices.
    config = make_config(tokens_per_row=64, rows=1 if strategy in ("odc", "hybrid") else 2)
    config.sharding.strategy = Strategy.ODC if strategy == "hybrid" else Strategy(strategy)
    config.sharding.hybrid = strategy == "hybrid"
    config.sharding.deterministic = strategy == "odc"
    config.sharding.devices_per_host = DEVICES // processes
    config.sharding.balance = Balance.LB_MINI
    config.algorithm.kl_coefficient = 0.1
    config.algorithm.importance.level = ImportanceLevel.SEQUENCE
    return config


def composer(config: Config) -> Composer:
    return Composer(config, DEVICES, MODEL.vision, tiny(HEADS).config.text)


def make_learner(config: Config, links=None) -> Learner:
    return Learner(config, tiny(HEADS), grpo.token_loss, links=links)


def groups_of(seed: int):
    return random_groups(seed)


def gradients(learner: Learner, composition):
    """(gradients, tally, the composition with what the loss read)."""
    reference = jax.tree.map(lambda weight: weight * np.float32(0.9), learner.params)
    composition = with_scores(composition, learner.gradients, learner.params, reference, learner.config)
    grads, tally = learner.accumulate(composition.everywhere)
    return grads, tally, composition


def scores(composition) -> dict[tuple[int, int], np.ndarray]:
    """What the loss read of the reference, then the log-ratio of the response, of each response's tokens here."""
    names = ("reference_logprobs_BT", "response_log_ratios_BT")
    found = [unpack(composition, [getattr(batch, name) for batch in composition.batches]) for name in names]
    return {key: np.concatenate([one[key] for one in found]) for key in found[0] if key[0] >= 0}
