"""The critic is a model of the policy's architecture that learns the values of states. Advantages follow from values.

The forward pass of the critic's learner returns values in the place of log-probs. Microbatches, strategies and the form
of checkpoints are those of the policy's learner.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.decoder import Decoder, first_weights, value_model, values
from models.inputs import PackedTokens
from sharding.walk import Params, Tally, Walk

from ..algorithms.ppo import explained_variance, gae, terminal_rewards, value_loss, whitened
from ..algorithms.rl_algorithm import Key
from ..base.types import Sample, TrainBatch
from ..batch.composer import Team
from ..batch.composition import Composition
from ..config import AlgorithmConfig, Config, LoraConfig
from .gradients import Gradients, Scores
from .learner import Learner, of_all_updates
from .loss_inputs import Arrays, decided, logprobs_of


class ValueGradients(Gradients):
    """Gradients of a critic's loss. `scores` and `logprobs` return values in the place of log-probs."""

    def _forward(self, model: Any, inputs: PackedTokens, walk: Walk) -> Scores:
        return (values(model, inputs, walk),)

    def _loss(self, model: Any, batch: TrainBatch, walk: Walk) -> tuple[Float[Array, ""], Tally]:
        [values_BT] = self._forward(model, batch.inputs, walk)
        token_loss_BT, metrics = self._phase.token_loss(values_BT, values_BT, batch, self._config.algorithm)
        trained_BT = batch.loss_weights_BT != 0.0
        loss = jnp.sum(batch.loss_weights_BT * token_loss_BT)
        sums = {name: jnp.sum(metric_BT) for name, metric_BT in metrics.items()}
        return loss, Tally({**sums, "loss": loss, "trained_tokens": jnp.sum(trained_BT, dtype=jnp.float32)}, {})


def token_loss(values_BT: Array, _: Array, batch: TrainBatch, cfg: AlgorithmConfig) -> tuple[Array, dict[str, Array]]:
    return value_loss(values_BT, batch)


class Critic(Learner):
    """The learner of the critic's weights. It is abstract, and takes no memory, until `begin` or `load_state`."""

    gradients_kind = ValueGradients

    def __init__(self, config: Config, policy: Decoder, **shared: Any) -> None:
        """`policy` may be abstract. `shared` has further arguments of `Learner`: those of the policy's learner."""
        optim = dataclasses.replace(config.optim, lr=config.critic.lr)
        # All weights of the critic are trained, even if the policy trains adapters only.
        own_config = dataclasses.replace(config, optim=optim, lora=LoraConfig())
        super().__init__(own_config, value_model(policy), token_loss, **shared)

    def begin(self, policy: Params, steps: int) -> None:
        """Begins RL of `steps` training steps with the policy's weights. All values are 0 at first."""
        self._abstract = False
        self.params = first_weights(policy, self.params)
        self.restart(steps)

    def restart(self, steps: int) -> None:
        """Begins RL anew for `steps` training steps with the present weights."""
        self.reset(token_loss, steps=steps * self.config.algorithm.updates)

    def update(self, grads: Params, tally: Tally, *, last: bool = True) -> dict[str, float]:
        """Makes an optimizer step, as `Learner.update` does. Metrics are `loss`, `lr`, `grad_norm` before clipping,
        `trained_tokens`, `skipped_nonfinite`, and the means over trained tokens of the metrics of `value_loss`."""
        report = self._updated(grads, tally, last=last)
        names = ["lr", "grad_norm", "skipped_nonfinite", *sorted(tally.sums)]
        metrics = dict(zip(names, report.tolist(), strict=True))
        tokens = max(metrics["trained_tokens"], 1.0)
        return metrics | {name: metrics[name] / tokens for name in ("value", "clip_fraction")}

    def judge(
        self, compositions: Sequence[Composition], scored: Mapping[Key, Sample], costs: Sequence[np.ndarray], team: Team
    ) -> tuple[list[Composition], dict[Key, float], dict[str, float]]:
        """Returns the minibatches of a step with values, returns and advantages of each token. Process 0 also returns
        the mean advantage of each response that has a token, and metrics. Must be called before the step's first
        optimizer step.

        Process 0 estimates all advantages. In process 0, `scored` has the responses of all processes by (draw,
        sample), with rewards as advantages. `costs` is empty, or has a flat array for each composition, which is
        subtracted from the tokens' rewards. Collective."""
        found = [logprobs_of(composition, self.gradients, self.params) for composition in compositions]
        pairs = zip(compositions, found, strict=True)
        known = [{"values": composition.of_responses(values_BT, np.float64)} for composition, values_BT in pairs]
        for part, cost in zip(known, costs, strict=False):
            part["costs"] = cost
        judged: list[Composition] = []
        means: dict[Key, float] = {}
        metrics: dict[str, float] = {}

        def estimated(keys: Sequence[Key], lengths: np.ndarray, numbers: Arrays) -> Arrays:
            arrays, means_R, measured = estimate(lengths, numbers, [scored[key] for key in keys], self.config)
            means.update(zip(keys, means_R.tolist(), strict=True))
            metrics.update(measured)
            return arrays

        lengths = [composition.lengths for composition in compositions]
        parts = decided(team, compositions, lengths, known, estimated)
        for composition, part, flat in zip(compositions, parts, known, strict=True):
            fields = {"values_BT": flat["values"], **part}
            arrays = {name: composition.scattered(numbers) for name, numbers in fields.items()}
            judged.append(composition.replaced(arrays))
        return judged, means, metrics


def estimate(
    lengths: np.ndarray, numbers: Arrays, outcomes: Sequence[Sample], config: Config
) -> tuple[Arrays, np.ndarray, dict[str, float]]:
    """Returns advantages and returns of the tokens of a step, the mean advantage of each response, and metrics.
    `numbers` has the critic's `values`, and perhaps `costs`, which are subtracted from the tokens' rewards."""
    turns = np.array([tokens for sample in outcomes for tokens in sample.response.turn_tokens])
    of_turns = [reward for sample in outcomes for reward in sample.response.turn_rewards(sample.advantage)]
    rewards = terminal_rewards(np.array(of_turns), turns)
    discounts = np.where(terminal_rewards(np.ones(len(turns)), turns), config.algorithm.discount, 1.0)
    if "costs" in numbers:
        rewards -= numbers["costs"]
    values = numbers["values"]
    estimates = gae(rewards, values, lengths, discounts, config.critic.gae_lambda)
    returns, used = estimates + values, whitened(estimates)
    metrics = {
        "critic/explained_variance": explained_variance(values, returns),
        "critic/return_mean": float(returns.mean()),
        "critic/return_std": float(returns.std()),
        "critic/advantage_mean": float(estimates.mean()),  # before whitening
        "critic/advantage_std": float(estimates.std()),
    }
    means = np.bincount(np.repeat(np.arange(len(lengths)), lengths), used) / lengths
    return {"returns_BT": returns, "advantages_BT": used}, means, metrics


def critic_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of a critic's optimizer steps in a training step, with names that begin with `critic/`."""
    merged = of_all_updates(updates)
    kept = [name for name in merged if name not in ("trained_tokens", "updates", "seconds/idle")]
    return {f"critic/{name}": merged[name] for name in kept}
