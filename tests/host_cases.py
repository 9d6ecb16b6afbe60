"""The same steps of training in one process and in several: every strategy, all that a loss may read."""

import jax
import numpy as np
from learner_cases import random_groups, tiny
from packing_cases import MODEL, QWEN3_5, make_config

from fluxjax.algorithms import find_algorithm
from fluxjax.batch.composer import Composer, Team
from fluxjax.batch.composition import Composition, unpack
from fluxjax.config import ODC, AlgorithmConfig, Config, Importance, ImportanceConfig, ImportanceLevel, KlEstimator
from fluxjax.config import STRATEGIES as KINDS
from fluxjax.learner.critic import Critic
from fluxjax.learner.learner import Learner
from fluxjax.learner.policy_trainer import PolicyTrainer, Portion, minibatches
from fluxjax.learner.run_models import RunModels

DEVICES = 4
HEADS = (4, 2)
STRATEGIES = ["fsdp", "ulysses", "flex_ulysses", "odc", "hybrid"]
SEEDS = [4, 11]  # odc: a microbatch of all devices; devices of a process that have none
VERSION = 9  # tokens are of 0 to 8
TRUNCATED = ImportanceConfig(Importance.TRUNCATE, bounds=(0.5, 1.5))
OF_RESPONSES = ImportanceConfig(Importance.TRUNCATE, ImportanceLevel.SEQUENCE, bounds=(0.5, 1.2))
IN_REWARD = {"kl_coefficient": 0.1, "kl_estimator": KlEstimator.K1, "kl_in_reward": True}
FEATURES = {
    "plain": AlgorithmConfig(kl_coefficient=0.1, importance=ImportanceConfig(level=ImportanceLevel.SEQUENCE)),
    "rewarded": AlgorithmConfig.of("rloo", importance=OF_RESPONSES, **IN_REWARD),
    "coupled": AlgorithmConfig.of("dpo", minibatches=2),
    "critic": AlgorithmConfig.of("ppo", minibatches=2, epochs=2, importance=TRUNCATED, **IN_REWARD),
    "early": AlgorithmConfig.of("gspo", kl_coefficient=0.1),  # some gradients before the rest of the step is there
    "states": AlgorithmConfig(kl_coefficient=0.1),  # of Qwen3.5; all others of Qwen2.5-VL
}


def settings(strategy: str, feature: str, processes: int) -> Config:
    own_pace = strategy in ("odc", "hybrid")
    config = make_config(tokens_per_row=48 if own_pace else 72, rows=1 if own_pace else 2)
    own = ODC(hybrid=strategy == "hybrid", deterministic=strategy == "odc")
    config.sharding.strategy = own if own_pace else KINDS[strategy]()
    config.sharding.devices_per_host = DEVICES // processes
    config.sharding.compile_ahead = int(strategy == "flex_ulysses")
    config.algorithm = FEATURES[feature]
    config.optim.lr, config.optim.eps = 1e-3, 1e-2  # or Adam would turn rounding into whole steps
    return config


class Recorded:
    """A trainer of one process, and what it makes of the groups of each seed."""

    def __init__(
        self, strategy: str, feature: str, processes: int, team: Team | None = None, mesh=None, links=None
    ) -> None:
        self.config = config = settings(strategy, feature, processes)
        sizes = QWEN3_5 if feature == "states" else MODEL
        self._early, self._algorithm = feature == "early", find_algorithm(config.algorithm)
        self.learner = Learner(config, tiny(HEADS, sizes), self._algorithm.token_loss, mesh=mesh, links=links)
        self.learner.version = VERSION
        self.composer = Composer(config, DEVICES, sizes.vision, self.learner.text)
        reference = jax.tree.map(lambda weight: weight * np.float32(0.9), self.learner.params)
        self.critic = None
        if self._algorithm.critic:
            self.critic = Critic(config, tiny(HEADS), mesh=self.learner.mesh, links=links)
            self.critic.begin(self.learner.params, config.steps)
            table = self.critic.params["head"]["table"]
            drawn = np.random.default_rng(0).normal(size=table.shape).astype(np.float32) / 8
            head = jax.make_array_from_callback(table.shape, table.sharding, lambda index: drawn[index])
            self.critic.params = {**self.critic.params, "head": {"table": head}}
        reference = reference if config.algorithm.kl_coefficient else None
        run_models = RunModels(config, self._algorithm, self.learner, self.critic, reference=reference)
        self.trainer = PolicyTrainer(config, run_models, self.composer, team=team)

    def composed(self, seed: int) -> list[Composition]:
        """The minibatches of a seed's groups, with what the loss reads beside the pass itself; in process 0."""
        groups, prepared = random_groups(seed)
        scored, trainer = self._algorithm.advantages(groups, self.config.algorithm), self.trainer
        dealt = minibatches(scored, self.config.algorithm.minibatches)
        parts = [Portion(part, prepared) for part in dealt]
        return trainer._scored(parts, trainer._composed(parts, trainer._place(), update=False), trainer._place())

    def followed(self, compositions: list[Composition]) -> list[Composition]:
        """The same in another process, which has its share of them."""
        parts = [Portion() for _ in compositions]
        return self.trainer._scored(parts, compositions, self.trainer._place())

    def results(self, composition: Composition) -> list[tuple]:
        """Gradients and sums of a minibatch, of the policy and of the critic."""
        learners = [self.learner] if self.critic is None else [self.learner, self.critic]
        return [learner.accumulate(composition.everywhere) for learner in learners]

    def steps(self, count: int) -> list[dict[str, float]]:
        """Makes so many steps, over all seeds in turn; in process 0. Returns the metrics of each."""
        found = []
        for step in range(count):
            groups, prepared = random_groups(SEEDS[step % len(SEEDS)])
            if self._early:
                for group in groups[:2]:
                    self.trainer.accumulate(step, [group], prepared)
                groups = groups[2:]
            found.append(dict(self.trainer.train(step, groups, prepared).metrics))
        return found


READ = ("reference_logprobs_BT", "response_log_ratios_BT", "advantages_BT", "values_BT", "returns_BT")


def scores(composition: Composition) -> dict[tuple[int, int], np.ndarray]:
    """What the loss reads of each response's tokens here, `[values, T]`."""
    arrays = {name: [getattr(batch, name) for batch in composition.batches] for name in READ}
    found = [unpack(composition, arrays_BT) for arrays_BT in arrays.values() if all(x is not None for x in arrays_BT)]
    return {key: np.stack([one[key] for one in found]) for key in composition.keys if key[0] >= 0}
