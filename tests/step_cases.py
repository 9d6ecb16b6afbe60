"""Training steps of a tiny text model: groups near its policy, the layouts a step may have, trainers, and one cached
step for each algorithm and layout."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from packing_cases import TEXT, compose, make_config, make_groups

import models
from fluxjax.algorithms import find_algorithm, grpo
from fluxjax.base.types import TrainedStep
from fluxjax.batch.composer import Composer
from fluxjax.batch.composition import Composition, unpack
from fluxjax.config import (
    FSDP,
    ODC,
    AlgorithmConfig,
    Config,
    FlexUlysses,
    Importance,
    ImportanceConfig,
    ImportanceLevel,
    Schedule,
)
from fluxjax.learner.critic import Critic
from fluxjax.learner.learner import Learner
from fluxjax.learner.policy_trainer import PolicyTrainer, Portion
from fluxjax.learner.run_models import RunModels
from sharding.mesh import make_mesh

CONTENTS = [[5], [9], [4], [12]]
LENGTHS = [[3, 1, 6], [4, 0, 4], [9, 5], [6, 3]]
VERSION = 11  # of the trainer; tokens are of 0 to 8, several versions a response
TOKEN = ImportanceConfig(Importance.TRUNCATE, bounds=(0.5, 1.3), decay=0.9, decoupled=True)
SEQUENCE = ImportanceConfig(
    Importance.MASK, ImportanceLevel.SEQUENCE, bounds=(0.8, 1.1), decay=0.9, decoupled=True, normalize=True
)
LAYOUTS = {
    "one row": (1, {"tokens_per_row": 128}),
    "rows": (1, {"tokens_per_row": 24, "rows": 8, "share": False}),
    "fsdp": (3, {}),
    "flex_ulysses": (4, {"strategy": FlexUlysses(), "tokens_per_row": 32}),  # groups are cut across devices
    "odc": (2, {"strategy": ODC()}),
}
TWICE: dict[str, Any] = {"minibatches": 2, "epochs": 2}
WIDE = AlgorithmConfig.of("gspo", clip_low=0.1, clip_high=0.15)
ALGORITHM_CASES = {
    "token weights": AlgorithmConfig(importance=TOKEN),
    "response weights": AlgorithmConfig(importance=SEQUENCE),
    "grpo twice": AlgorithmConfig(**TWICE),
    "token weights twice": AlgorithmConfig(importance=TOKEN, **TWICE),
    "gspo": WIDE,
    "gspo twice": dataclasses.replace(WIDE, epochs=2),
    "ppo twice": AlgorithmConfig.of("ppo", **TWICE),
}


def config_for(cfg: ImportanceConfig, strategy=None, tokens_per_row=64, rows=1, share=True) -> Config:
    config = make_config(tokens_per_row, rows, share=share)
    config.algorithm.importance = cfg
    config.sharding.strategy = strategy or FSDP()
    config.optim.eps = 1e-2  # Adam divides by tiny second moments, which would turn rounding into whole steps
    return config


def samples_of(groups):
    return [sample for group in groups for sample in group.samples if sample.response.token_ids]


def key_of(sample):
    return sample.response.draw, sample.response.sample


def flat(learner):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(learner.params)])


@functools.cache
def near_policy():
    """Groups with advantages, of mixed versions, whose behaviour log-probs lie near the policy's; the policy's own."""
    groups, prepared = make_groups([[*content] for content in CONTENTS], LENGTHS, seed=5)
    config = config_for(ImportanceConfig(), tokens_per_row=128)
    composition = compose(groups, prepared, config)
    learner = Learner(config, models.create(TEXT, seed=1), grpo.token_loss, mesh=make_mesh(1))
    own = unpack(composition, [learner.logprobs(batch.inputs)[0] for batch in composition.batches])
    rng = np.random.default_rng(0)

    def near(sample):
        values = own.get(key_of(sample), np.zeros(0))
        logprobs = tuple((values + rng.uniform(-0.7, 0.7, len(values))).astype(np.float32).tolist())
        return dataclasses.replace(sample, response=dataclasses.replace(sample.response, logprobs=logprobs))

    groups = [dataclasses.replace(group, samples=tuple(map(near, group.samples))) for group in groups]
    return grpo.advantages(groups, config.algorithm), prepared, own


def learner_of(algorithm: AlgorithmConfig, layout="one row", falling=0, critic=None) -> Learner:
    """A learner whose learning rate falls over so many training steps, or is constant; `critic` has settings."""
    devices, laid = LAYOUTS[layout]
    config = config_for(algorithm.importance, **laid)
    config.algorithm = dataclasses.replace(algorithm)
    if falling:
        config.optim.schedule, config.steps = Schedule.LINEAR, falling
    for name, value in (critic or {}).items():
        setattr(config.critic, name, value)
    token_loss = find_algorithm(algorithm).token_loss
    learner = Learner(config, models.create(TEXT, seed=1), token_loss, mesh=make_mesh(devices))
    learner.version = VERSION
    return learner


def critic_for(config: Config, policy, learner: Learner, seed: int | None = 0) -> Critic:
    """A critic that has begun with the learner's weights; with `seed` its head is drawn: values are of about one."""
    critic = Critic(config, policy, mesh=learner.mesh)
    critic.begin(learner.params, config.steps)
    if seed is not None:
        table = critic.params["head"]["table"]
        drawn = np.random.default_rng(seed).normal(size=table.shape).astype(np.float32) / np.sqrt(table.shape[1])
        critic.params = {**critic.params, "head": {"table": jax.device_put(drawn, table.sharding)}}
    return critic


def trainer_of(
    algorithm: AlgorithmConfig, layout="one row", referred=False, falling=0, critic=None, **further: Any
) -> tuple[PolicyTrainer, Learner]:
    """A trainer and its learner. The reference's weights are 0.9 times the policy's; `critic` has settings."""
    learner = learner_of(algorithm, layout, falling, critic)
    config = learner.config
    found = find_algorithm(algorithm)
    own = critic_for(config, models.create(TEXT, seed=1), learner) if found.critic else None
    reference = jax.tree.map(lambda weight: 0.9 * weight, learner.params) if referred else None
    composer = Composer(config, learner.mesh.size, text=learner.text)
    run_models = RunModels(config, found, learner, own, reference=reference)
    return PolicyTrainer(config, run_models, composer, **further), learner


def composed(trainer: PolicyTrainer, parts: Sequence[Portion]) -> list[Composition]:
    """The microbatches of each part, with all that the loss reads."""
    place = trainer._place()
    return trainer._scored(parts, trainer._composed(parts, place), place)


@functools.cache
def trained(case: str, layout="one row") -> tuple[TrainedStep, Learner, Critic | None]:
    """A trainer's step of the algorithm that the case names, its learner and its critic."""
    trainer, learner = trainer_of(ALGORITHM_CASES[case], layout, falling=20 if "twice" in case else 0)
    groups, prepared, _ = near_policy()
    step = trainer.train(0, groups, prepared)
    assert learner.version == VERSION + 1
    return step, learner, trainer._critic
