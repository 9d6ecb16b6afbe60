"""What tail batching promises (Flexes, section 3): short rounds in excess, long rounds for what they left behind."""

from __future__ import annotations

import math

from ...config import Config
from ...coordinator.ledger import PromptStage
from ...coordinator.machine import Settings
from ...coordinator.messages import DrawPrompts, Event, Generate, Instruction, Park, Train
from .books import UNDER_WAY
from .rounds_promises import RoundPromises


class TailBatchingPromises(RoundPromises):
    """`kinds` are those of the rounds so far."""

    def __init__(self, config: Config, settings: Settings) -> None:
        super().__init__(config, settings)
        self.kinds: list[str] = []
        self.first: list[int] = []  # draws whose groups were complete (dynamic sampling: scored) first in this round

    @property
    def long(self) -> bool:
        return self.kinds[-1] == "long"

    @property
    def wanted(self) -> int:
        """Prompts under way in this round."""
        return self.needed if self.long else math.ceil(self.eta("prompts") * self.needed)

    def eta(self, name: str) -> float:
        return self.scheduled(f"tail_{name}", getattr(self.config.tail_batching, name))

    def begins(self) -> None:
        """A long round comes as soon as a step's worth of deferred prompts waits, and when the data ends."""
        deferred = self.books.count(PromptStage.DEFERRED)
        self.kinds.append("long" if deferred >= self.needed or self.books.exhausted else "short")
        self.first = []

    def _under_way(self) -> int:
        return self.books.count(*UNDER_WAY, PromptStage.SCORED, PromptStage.TRAINING)

    def _won(self) -> int:
        """Groups that count as complete."""
        return self.books.count(PromptStage.SCORED, PromptStage.TRAINING) + (
            0 if self.dynamic else self.books.count(PromptStage.COMPLETE)
        )

    def in_round(self, instruction: DrawPrompts | Generate) -> None:
        books, missing = self.books, self.wanted - self._under_way()
        if isinstance(instruction, DrawPrompts):
            self.expect(instruction.count == missing, f"{instruction.count} prompts are drawn, {missing} are missing")
            left = books.count(PromptStage.DEFERRED) if self.long else 0
            self.expect(not left, f"new prompts in a long round, while {left} wait for it")
            return
        draws = [request.prompt.draw for request in instruction.requests]
        deferred, fresh = books.at(PromptStage.DEFERRED), books.at(PromptStage.WAITING)
        for request in instruction.requests:
            if not request.begun:
                n = math.ceil((1.0 if self.long else self.eta("responses")) * self.settings.group_size)
                self.expect(request.n == n, f"{request.rid} launches {request.n} responses, not {n}")
                self.expect(request.need == self.settings.group_size, f"{request.rid} needs {request.need} responses")
            self.goes_on(books.prompts[request.prompt.draw], request, books.version if books.lent else 1 << 62)
        if any(request.begun for request in instruction.requests):
            return  # what ran on engines that were lent
        if draws != [seen.draw for seen in fresh]:
            allowed = (self.long or books.exhausted) and draws == [seen.draw for seen in deferred][:missing]
            self.expect(allowed, f"draws {draws} are launched, {missing} are missing")

    def heard(self, event: Event) -> None:
        super().heard(event)
        stages = (PromptStage.SCORED,) if self.dynamic else (PromptStage.COMPLETE, PromptStage.SCORED)
        for seen in self.books.at(*stages):
            if seen.draw not in self.first and (not self.dynamic or seen.varied()):
                self.first.append(seen.draw)

    def said(self, instruction: Instruction) -> None:
        if isinstance(instruction, Park):
            self._parks(instruction)
        if isinstance(instruction, Train):
            self._wins(instruction)
        super().said(instruction)

    def _parks(self, order: Park) -> None:
        seen = self.books.prompts[order.prompt.draw]
        if not order.keep:
            self.expect(self._won() >= self.needed, f"draw {seen.draw} is put off before the round is won")
            if seen.stage is PromptStage.RUNNING:
                self.expect(not self.long, f"draw {seen.draw} is cut off in a long round")

    def _wins(self, order: Train) -> None:
        """The first groups to be complete win; all other prompts are kept for a long round. Where something else had to
        be awaited when the round was won (a draw, engines that were lent), more were complete then: any of those."""
        books = self.books
        kept = {seen.draw for seen in books.at(PromptStage.DEFERRED)}
        draws = {group.prompt.draw for group in order.groups} | {seen.draw for seen in books.at(PromptStage.TRAINING)}
        self.expect(kept | draws == set(books.prompts), f"of {sorted(books.prompts)}, {sorted(kept)} are kept")
        first = self.first if self.dynamic or self.lends else self.first[: self.needed]
        self.expect(draws <= set(first), f"draws {sorted(draws)} win, complete were first {first}")

    def waits(self) -> None:
        super().waits()
        books = self.books
        if not self.open or self.given_up or books.awaiting:
            return
        if self._won() < self.needed:
            wait = books.exhausted and not books.count(PromptStage.DEFERRED)
            under_way = self._under_way()
            self.expect(wait or under_way >= self.wanted, f"{under_way} prompts are under way, not {self.wanted}")
            return
        running = books.count(PromptStage.RUNNING)
        self.expect(not running, f"{running} prompts are waited for although the round is won")
        pending = (
            books.count(PromptStage.STOPPING) or books.count(PromptStage.SCORED, PromptStage.TRAINING) < self.needed
        )
        self.expect(bool(pending), "nothing is trained although the round is won")
