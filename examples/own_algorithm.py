"""An algorithm of your own: imitate the best answers of each group (RAFT, arXiv:2304.06767), below in 25 lines.

    python examples/own_algorithm.py
    python examples/own_algorithm.py --config.steps=50                                  every setting of fluxjax.train
    PYTHONPATH=examples python -m fluxjax.train --config=configs/text.py:debug \
        --config.algorithm.name=own_algorithm:BestOfGroup                               without a script of your own

`advantages` runs on the host, over scored groups; `token_loss` runs inside `jit`, over a packed batch, whose loss
weights already hold the normalisation (`algorithm.loss_aggregation`). See docs/algorithms.md.
"""

import sys

from fluxjax.algorithms import RLAlgorithm, rewards_of
from fluxjax.algorithms.loss import masked
from fluxjax.config import cli
from fluxjax.report.metrics import read
from fluxjax.run.trainer import FluxTrainer


class BestOfGroup(RLAlgorithm):
    """Learns the responses with the highest reward of their group. The others are ignored, and so are groups without
    any difference in reward."""

    def __init__(self, temper: float = 1.0) -> None:
        self.temper = temper  # settings of your own are arguments

    def advantages(self, groups, cfg):
        return [group.with_advantages(self._best(rewards_of(group))) for group in groups]

    def _best(self, rewards_G):
        return self.temper * ((rewards_G == rewards_G.max()) & (rewards_G > rewards_G.min()))

    def token_loss(self, logprobs_BT, entropies_BT, batch, cfg):
        surprise_BT = masked(-logprobs_BT, batch.loss_weights_BT != 0.0)
        return batch.advantages_BT * surprise_BT, {"surprise": surprise_BT}

    def idle_without_advantage(self, cfg):
        return True  # groups whose advantages are all 0 need not be computed


def main() -> None:
    config = cli.load(["--config=configs/text.py:debug", *sys.argv[1:]])
    with FluxTrainer(config, algorithm=BestOfGroup(temper=0.5)) as trainer:
        trainer.fit()
    for record in read(trainer.run_dir / "metrics.jsonl"):
        if record["phase"] == "rl":
            print(f"step {record['step']}: loss {record['loss']:+.4f}, surprise {record['surprise']:.3f} nats a token")


if __name__ == "__main__":
    main()
