"""A scheduling policy of your own: no training on hopeless prompts; others are drawn in their place.

    python examples/own_policy.py
    python examples/own_policy.py --config.steps=50          every setting of fluxjax.train

The coordinator calls `decide` after every event and carries out the instructions that it returns, until it returns
none. A policy reads the books (`coordinator.ledger`) and changes nothing itself, so it can be tested without a model.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fluxjax.config import cli
from fluxjax.coordinator import Coordinator, PromptStage, Synchronous
from fluxjax.coordinator.messages import Instruction, Skip
from fluxjax.run.trainer import FluxTrainer


class Hopeful(Synchronous):
    """`Synchronous`, but skips prompts whose best response earned less than half; at most a step's worth a step."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[int, int] = {}  # by step

    def decide(self, coordinator: Coordinator) -> Sequence[Instruction]:
        left = coordinator.settings.prompts_per_step - self.skipped.get(coordinator.step, 0)
        scored = coordinator.ledger.at(PromptStage.SCORED)
        hopeless = [e for e in scored if max(sample.reward.value for sample in e.group().samples) < 0.5][:left]
        if hopeless:
            self.skipped[coordinator.step] = self.skipped.get(coordinator.step, 0) + len(hopeless)
            return [Skip(entry.prompt, "no response earned half of the marks") for entry in hopeless]
        return super().decide(coordinator)

    def state_dict(self) -> dict[str, Any]:
        """The part of it that a checkpoint keeps, as JSON."""
        return {"skipped": list(self.skipped.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped = dict(state.get("skipped", ()))  # a run that began with another policy has none


def main() -> None:
    config = cli.load(["--config=configs/text.py:debug", *sys.argv[1:]])
    with FluxTrainer(config, policy=Hopeful) as trainer:
        trainer.fit()
        assert isinstance(trainer.coordinator.policy, Hopeful)
        for step, count in trainer.coordinator.policy.skipped.items():
            print(f"step {step + 1}: {count} hopeless prompts were replaced")


if __name__ == "__main__":
    main()
