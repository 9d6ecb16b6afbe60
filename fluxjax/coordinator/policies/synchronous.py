"""Strictly on-policy training, step by step: the reference that every other policy is compared with.

One step: draw P prompts, generate G responses to each under one weight version, score each response as soon as it
ends, train on all P groups in draw order, publish the new weights. Evaluations and checkpoints come between steps,
when nothing is in flight.
"""

from collections.abc import Sequence

from ..ledger import PromptStage
from ..machine import Coordinator
from ..messages import DrawPrompts, Instruction
from .rounds import Rounds, generate


class Synchronous(Rounds):
    """The policy of the module's docstring. It follows from the books alone and has no state of its own."""

    def _in_round(self, coordinator: Coordinator) -> bool:
        return coordinator.ledger.live > 0

    def _round(self, coordinator: Coordinator) -> Sequence[Instruction]:
        ledger, settings = coordinator.ledger, coordinator.settings
        size = settings.group_size
        missing = settings.prompts_per_step - ledger.live
        if missing > 0 and not coordinator.exhausted:
            return [DrawPrompts(missing)]
        # A prompt is deferred if its engine was lent, or if another policy's run was resumed with this policy.
        if waiting := ledger.at(PromptStage.DEFERRED, PromptStage.WAITING):
            moving = {entry.prompt.draw for entry in self._moving(coordinator) if entry.need == size}
            return generate(coordinator, waiting, size, size, keep=lambda entry: entry.prompt.draw in moving)
        if ledger.count(PromptStage.RUNNING, PromptStage.STOPPING, PromptStage.COMPLETE) or coordinator.awaiting:
            return []
        return self._train(coordinator, ledger.at(PromptStage.SCORED))
