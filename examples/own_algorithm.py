"""An algorithm of your own: REINFORCE with a leave-one-out baseline (RLOO, arXiv:2402.14740, equation 8).

    python examples/own_algorithm.py
    python examples/own_algorithm.py --config.steps=50       every setting of fluxjax.train

An algorithm has two functions: `advantages` runs on the host, over scored groups; `token_loss` runs inside `jit`, over
a packed batch. The batch's loss weights already hold the normalisation (`algorithm.loss_aggregation`).
"""

import dataclasses
import sys
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from fluxjax.base.types import Group, TrainBatch
from fluxjax.config import AlgorithmConfig, cli
from fluxjax.report.metrics import read
from fluxjax.run.trainer import FluxTrainer


class LeaveOneOut:
    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """Each response's reward minus the mean of the others' of its group."""
        return [self._with_advantages(group) for group in groups]

    def _with_advantages(self, group: Group) -> Group:
        total, count = sum(sample.reward.value for sample in group.samples), len(group.samples)
        samples = tuple(
            dataclasses.replace(s, advantage=s.reward.value - (total - s.reward.value) / (count - 1))
            for s in group.samples
        )
        return dataclasses.replace(group, samples=samples)

    def token_loss(
        self,
        logprobs_BT: Float[Array, "B T"],
        entropies_BT: Float[Array, "B T"],
        batch: TrainBatch,
        cfg: AlgorithmConfig,
    ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
        """The policy gradient as it stands: on-policy, so without ratios and clipping."""
        trained_BT = batch.loss_weights_BT != 0.0
        surprise_BT = jnp.where(trained_BT, -logprobs_BT, 0.0)
        return batch.advantages_BT * surprise_BT, {"surprise": surprise_BT}


def main() -> None:
    config = cli.load(["--config=configs/text.py:debug", *sys.argv[1:]])
    with FluxTrainer(config, algorithm=LeaveOneOut()) as trainer:
        trainer.fit()
    for record in read(trainer.run_dir / "metrics.jsonl"):
        if record["phase"] == "rl":
            print(f"step {record['step']}: loss {record['loss']:+.4f}, surprise {record['surprise']:.3f} nats a token")


if __name__ == "__main__":
    main()
