"""What adaptive async promises (Flux, component 1): how far generation runs ahead, and when it waits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...config import Config
from ...config.pid import Pid
from ...coordinator.ledger import PromptStage
from ...coordinator.machine import Settings
from ...coordinator.messages import (
    DrawPrompts,
    Evaluate,
    Event,
    Generate,
    Instruction,
    Park,
    PublishWeights,
    SaveCheckpoint,
    Train,
    Trained,
)
from ...coordinator.selection import compose
from .base import Promises
from .books import UNDER_WAY, Seen

_WAITING = (PromptStage.DEFERRED, PromptStage.WAITING)


class AdaptiveAsyncPromises(Promises):
    """The async ratio and the barriers are worked out once more, from the metrics of the steps."""

    def __init__(self, config: Config, settings: Settings) -> None:
        super().__init__(config, settings)
        self.options = options = config.adaptive_async
        self.pid = Pid(options.ratio, options.min_ratio, options.max_ratio, kp=options.kp, ki=options.ki, kd=options.kd)
        self.staleness, self.barriers, self.barrier, self.since = 0.0, 0, False, 0

    @property
    def capacity(self) -> int:
        """Prompts that may be under way or wait to be trained on."""
        ahead = 1 + self.pid.value * self.options.max_staleness
        return math.floor(min(ahead, self.settings.steps - self.books.step) * self.needed)

    def heard(self, event: Event) -> None:
        if not isinstance(event, Trained):
            return
        options, metrics = self.options, event.metrics
        kl = metrics.get("staleness/kl", 0.0) / options.kl_normalizer
        variance = math.log(1 + max(metrics.get("staleness/variance", 0.0), 0.0)) / options.variance_normalizer
        gap = metrics.get("staleness/lag_mean", 0.0) / max(options.max_staleness, 1)
        now = options.kl_weight * kl + options.variance_weight * variance + options.gap_weight * gap
        now = min(max(now, 0.0), 1.0)
        self.staleness = options.ema * self.staleness + (1 - options.ema) * now
        target = self.scheduled("target_staleness", options.target_staleness)
        self.pid.update(target - self.staleness)
        self.since += 1
        if not self.barrier and (
            self.staleness > target + options.tolerance + 1e-12 or self.since > options.sync_interval
        ):
            self.barrier, self.barriers = True, self.barriers + 1

    def usable(self) -> Sequence[int]:
        served = self.books.served
        if self.pid.value and self.options.interrupt:
            return range(len(served))
        return [engine for engine, version in enumerate(served) if version == self.books.version]

    def said(self, instruction: Instruction) -> None:
        match instruction:
            case DrawPrompts(count):
                self._draws(count)
            case Generate(requests):
                for request in requests:
                    seen = self.books.prompts[request.prompt.draw]
                    self.goes_on(seen, request, self.books.version - self.options.max_staleness + 1)
                self._launches(instruction)
            case Park():
                self._parks(instruction)
            case Train():
                self._chosen(instruction)
            case PublishWeights():
                self._publishes(instruction)
        super().said(instruction)

    def _draws(self, count: int) -> None:
        """As many as there is room for, not one less; during a barrier none, and it lasts until nothing runs."""
        books = self.books
        if self.barrier:
            over = not (books.awaiting or books.count(*UNDER_WAY))
            self.expect(over, "something new begins although a barrier was declared")
            self.barrier, self.since = False, 0
        room = self.capacity - len(books.prompts)
        self.expect(count == room, f"{count} prompts are drawn, there is room for {room}")

    def _launches(self, order: Generate) -> None:
        size = self.settings.group_size
        waiting = [seen.draw for stage in _WAITING for seen in self.books.at(stage)]
        draws = [request.prompt.draw for request in order.requests]
        again = [seen.draw for seen in self.books.at(PromptStage.LOST)]
        self.expect(draws == waiting or draws == again[:1], f"draws {draws} are generated, {waiting} wait")
        for request in order.requests:
            self.expect((request.n, request.need) == (size, size), f"{request.rid} launches {request.n}")

    def _parks(self, order: Park) -> None:
        if not self.parks_to_end(order):
            seen = self.books.prompts[order.prompt.draw]
            late = not order.keep and seen.stage is PromptStage.SCORED and self._age(seen) > self.options.max_staleness
            self.expect(late, f"draw {seen.draw} ({seen.stage.value}) is parked")

    def _age(self, seen: Seen) -> int:
        versions = [version for response in seen.ended.values() for version in response.versions]
        return self.books.version - min(versions, default=self.books.version)

    def _chosen(self, order: Train) -> None:
        """What the composer says of all groups that are scored; nothing is trained on while a prompt under way would
        become too old by missing the step."""
        books, settings = self.books, self.settings
        scored = [seen.group() for seen in books.at(PromptStage.SCORED)]
        wanted = compose(
            scored,
            min(self.needed, len(scored)),
            self.config.composer,
            version=books.version,
            max_staleness=self.options.max_staleness,
            progress=books.step / settings.steps,
            seed=self.config.seed,
            step=books.step,
        )
        draws = [group.prompt.draw for group in wanted]
        self.expect(list(order.groups) == list(wanted), f"draws {draws} should be trained on")
        late = [seen.draw for seen in books.at(*UNDER_WAY) if self._would_be_late(seen)]
        self.expect(not late, f"draws {late} become too old by missing this step")

    def _would_be_late(self, seen: Seen) -> bool:
        return self.books.version - seen.born >= self.options.max_staleness

    def _publishes(self, order: PublishWeights) -> None:
        books = self.books
        self.expect(order.version == books.version, f"version {order.version} is published")
        if not self.options.interrupt:
            old = {e for e, version in enumerate(books.served) if version != books.version and not books.busy(e)}
            self.expect(set(order.engines) == old, f"engines {order.engines} get the new weights, {old} are idle")
        else:
            self.expect(not order.engines, f"only engines {order.engines} get the new weights")

    # --- waiting --------------------------------------------------------------------------------

    def waits(self) -> None:
        super().waits()
        books = self.books
        if PublishWeights not in books.awaiting:
            self._serves_the_newest()
        last = bool(self.ending or books.stop)
        if last or (books.awaiting and not self.pid.value):
            return
        self.expect(not self._could_train(), "nothing is trained although a step's groups are scored")
        if DrawPrompts in books.awaiting or not self.usable():
            return
        waiting = books.count(*_WAITING)
        self.expect(not waiting, f"{waiting} prompts wait for nothing")
        if not (self.barrier or books.exhausted):
            live, most = len(books.prompts), self.capacity
            self.expect(live >= most, f"generation is {live} prompts ahead, it may be {most}")

    def _serves_the_newest(self) -> None:
        books = self.books
        old = [e for e, version in enumerate(books.served) if version != books.version]
        if not self.options.interrupt:
            old = [engine for engine in old if not books.busy(engine)]
        self.expect(not old, f"engines {old} serve {books.served}, the trainer has {books.version}")

    def _could_train(self) -> bool:
        books, settings = self.books, self.settings
        scored = books.count(PromptStage.SCORED)
        if books.awaiting.keys() & {Train, Evaluate, SaveCheckpoint}:
            return False
        if not scored or (scored < self.needed and not (books.exhausted and scored == len(books.prompts))):
            return False
        step = books.step
        every = settings.evaluate_every
        if (step == 0 or (every and step % every == 0)) and step not in {evaluated for evaluated, _ in self.evaluated}:
            return False
        every = settings.checkpoint_every
        if every and step and step % every == 0 and step not in self.saved:
            return False
        return not any(self._would_be_late(seen) for seen in books.at(*UNDER_WAY))
