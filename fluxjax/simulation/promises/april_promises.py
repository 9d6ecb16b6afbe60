"""What APRIL promises: more prompts under way than a step needs, and what is begun goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...coordinator.ledger import PromptStage
from ...coordinator.messages import Accumulate, DrawPrompts, Generate, Instruction, Park, Train
from .books import Seen
from .rounds_promises import RoundPromises


class AprilPromises(RoundPromises):
    """See the module's docstring."""

    @property
    def oldest(self) -> int:
        """The oldest version that may be trained on now."""
        return self.books.version - self.config.april.max_staleness

    @property
    def target(self) -> int:
        """Prompts under way."""
        return math.ceil(self.config.april.oversample * self.needed)

    def in_round(self, instruction: DrawPrompts | Generate) -> None:
        books, size = self.books, self.settings.group_size
        if isinstance(instruction, DrawPrompts):
            missing = self.target - len(books.prompts)
            self.expect(instruction.count == missing, f"{instruction.count} prompts are drawn, {missing} are missing")
            scored = books.count(PromptStage.SCORED, PromptStage.TRAINING)
            self.expect(scored < self.needed, "prompts are drawn although the step has all its groups")
            return
        waiting = {seen.draw for seen in books.at(PromptStage.DEFERRED, PromptStage.WAITING)}
        draws = {request.prompt.draw for request in instruction.requests}
        self.expect(draws == waiting, f"draws {sorted(draws)} are generated, {sorted(waiting)} wait")
        for request in instruction.requests:
            self.expect((request.n, request.need) == (size, size), f"{request.rid} launches {request.n}")
            self.goes_on(books.prompts[request.prompt.draw], request, self.oldest)

    def said(self, instruction: Instruction) -> None:
        if isinstance(instruction, Park) and not instruction.keep:
            seen = self.books.prompts[instruction.prompt.draw]
            late = seen.stage is PromptStage.SCORED and seen.born < self.oldest
            self.expect(late, f"draw {seen.draw} ({seen.stage.value}, born under {seen.born}) is begun anew")
        if isinstance(instruction, Train):
            self._oldest_first(instruction)
        super().said(instruction)

    def _oldest_first(self, order: Train) -> None:
        candidates = sorted(self.books.at(PromptStage.SCORED, PromptStage.TRAINING), key=_age)
        wanted = {seen.draw for seen in candidates[: self.needed]}
        draws = {group.prompt.draw for group in order.groups}
        draws |= {seen.draw for seen in self.books.at(PromptStage.TRAINING)}
        self.expect(draws == wanted, f"draws {sorted(draws)} are trained on, the oldest are {sorted(wanted)}")
        late = [
            seen.draw for seen in self.books.at(PromptStage.STOPPING, PromptStage.COMPLETE) if seen.born <= self.oldest
        ]
        self.expect(not late, f"draws {late} become too old by missing this step")

    def ready(self) -> Sequence[Seen]:
        first = sorted(self.books.prompts.values(), key=_age)[: self.needed]
        return [seen for seen in first if seen.stage is PromptStage.SCORED]

    def waits(self) -> None:
        super().waits()
        books = self.books
        if not self.open or self.given_up or books.awaiting.keys() - {Accumulate}:
            return
        idle = books.count(PromptStage.DEFERRED, PromptStage.WAITING)
        self.expect(not idle, f"{idle} prompts wait for nothing")
        scored = books.count(PromptStage.SCORED, PromptStage.TRAINING)
        enough = scored if self.dynamic else scored + books.count(PromptStage.COMPLETE)
        if scored < self.needed and not books.exhausted:
            self.expect(len(books.prompts) >= self.target, f"{len(books.prompts)} prompts under way, not {self.target}")
        if books.awaiting:
            return
        running = books.at(PromptStage.RUNNING, PromptStage.STOPPING)
        grows = bool(running) and (enough < self.needed or any(seen.born <= self.oldest for seen in running))
        complete = books.at(PromptStage.COMPLETE)
        judged = bool(complete) and (scored < self.needed or any(seen.born <= self.oldest for seen in complete))
        self.expect(grows or judged, "nothing is trained although the round has all that it needs")


def _age(seen: Seen) -> tuple[int, int]:
    return seen.born, seen.draw
