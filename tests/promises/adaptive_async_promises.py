"""The promises of adaptive async (Flux, component 1): how far generation runs ahead, and when it waits."""

import math
from collections.abc import Sequence

from fluxjax.base.types import ENVIRONMENT
from fluxjax.config import AdaptiveAsyncConfig, Config
from fluxjax.config.schedules import Pid
from fluxjax.coordinator.ledger import PromptStage
from fluxjax.coordinator.machine import Settings
from fluxjax.coordinator.messages import (
    DrawPrompts,
    Evaluate,
    Event,
    Instruction,
    Park,
    PublishWeights,
    SaveCheckpoint,
    Train,
    Trained,
)
from fluxjax.coordinator.policies.adaptive_async import SYNC_INTERVAL, TOLERANCE, compose

from .base import Promises
from .books import UNDER_WAY, Seen


class AdaptiveAsyncPromises(Promises):
    """Computes the async ratio and the barriers once more, from the metrics of the steps, and compares the run with
    them."""

    def __init__(self, config: Config, settings: Settings) -> None:
        super().__init__(config, settings)
        assert isinstance(config.policy, AdaptiveAsyncConfig)
        self.options = options = config.policy
        low, high = (options.ratio, options.ratio) if options.ratio in (0.0, 1.0) else (0.1, 0.9)
        self.pid = Pid(options.ratio, min(low, options.ratio), max(high, options.ratio), kp=0.1, ki=0.01, kd=0.05)
        self.sync_interval, self.tolerance = SYNC_INTERVAL, TOLERANCE
        self.staleness, self.barriers, self.barrier, self.since = 0.0, 0, False, 0

    @property
    def wanted(self) -> int:
        ahead = 1 + self.pid.now * self.options.max_staleness
        return math.floor(min(ahead, self.settings.steps - self.books.step) * self.needed)

    @property
    def oldest(self) -> int:
        return self.books.version - self.options.max_staleness + 1

    def heard(self, event: Event) -> None:
        if not isinstance(event, Trained):
            return
        options, metrics = self.options, event.metrics
        kl = metrics.get("staleness/kl", 0.0) / 0.1
        variance = math.log(1 + max(metrics.get("staleness/variance", 0.0), 0.0)) / 2.0
        gap = metrics.get("staleness/lag_mean", 0.0) / max(options.max_staleness, 1)
        now = 0.4 * kl + 0.3 * variance + 0.3 * gap
        now = min(max(now, 0.0), 1.0)
        self.staleness = 0.9 * self.staleness + (1 - 0.9) * now
        target = self.scheduled("target_staleness", options.target_staleness)
        self.pid.update(target - self.staleness)
        self.since += 1
        if not self.barrier and (self.staleness > target + self.tolerance + 1e-12 or self.since > self.sync_interval):
            self.barrier, self.barriers = True, self.barriers + 1

    def usable(self) -> Sequence[int]:
        """Engines with older weights are used as well, if no group becomes too old thereby."""
        served, version = self.books.served, self.books.version
        if self.pid.now and self.options.interrupt and self._all_in_time([min(served)] * len(self.waiting)):
            return range(len(served))
        return [engine for engine, serves in enumerate(served) if serves == version]

    def _all_in_time(self, new: Sequence[int]) -> bool:
        """Says whether all groups, with those that begin now (`new`), can be trained on in time."""
        births = [seen.born for seen in self.books.at(*UNDER_WAY)]
        births += map(self._birth, self.books.at(PromptStage.SCORED))
        first = self.books.version + (Train in self.books.awaiting) - self.options.max_staleness
        return all(first + i // self.needed <= born for i, born in enumerate(sorted([*births, *new])))

    def said(self, instruction: Instruction) -> None:
        match instruction:
            case DrawPrompts() if self.barrier:  # it lasts until nothing runs
                over = not (self.books.awaiting or self.books.count(*UNDER_WAY))
                self.expect(over, "something new begins although a barrier was declared")
                self.barrier, self.since = False, 0
            case Park():
                self._parks(instruction)
            case Train():
                self._chosen(instruction)
            case PublishWeights():
                self._publishes(instruction)
        super().said(instruction)

    def _parks(self, order: Park) -> None:
        """Checks that a response that still runs when the run ends keeps its tokens, and that nothing else is parked:
        no group becomes too old once it is generated and scored."""
        seen = self.books.prompts[order.prompt.draw]
        last = bool(self.ending or self.books.stop)
        self.expect(order.keep and last, f"draw {seen.draw} ({seen.stage.value}) is parked")

    def _in_time(self, births: Sequence[int]) -> Sequence[bool]:
        """Says of groups, the oldest first, whether they are in time if later steps train on them in this order."""
        late = self.books.version + 1 - self.options.max_staleness
        return [late + i // self.needed <= born for i, born in enumerate(sorted(births))]

    def _urgent(self, scored: Sequence[Seen]) -> int:
        """Returns the least number of the oldest scored groups with which the next step makes all others in time."""
        births, under_way = sorted(map(self._birth, scored)), [seen.born for seen in self.books.at(*UNDER_WAY)]
        return next(n for n in range(len(births) + 1) if all(self._in_time([*births[n:], *under_way])))

    def _birth(self, seen: Seen) -> int:
        versions = [v for response in seen.ended.values() for v in response.versions if v != ENVIRONMENT]
        return min(versions, default=self.books.version)

    def _chosen(self, order: Train) -> None:
        """Checks that the step trains on the choice of `compose` among all scored groups, and on nothing
        while a prompt under way would become too old by missing the step."""
        books, settings = self.books, self.settings
        seen = books.at(PromptStage.SCORED)
        scored = [one.group() for one in seen]
        wanted = compose(
            scored,
            min(self.needed, len(scored)),
            self.options.prefer,
            version=books.version,
            urgent=self._urgent(seen),
            progress=books.step / settings.steps,
            seed=self.config.seed,
            step=books.step,
        )
        draws = [group.prompt.draw for group in wanted]
        self.expect(list(order.groups) == list(wanted), f"draws {draws} should be trained on")
        late = self._late()
        self.expect(not late, f"draws {late} become too old by missing this step")

    def _late(self) -> Sequence[int]:
        """Returns the draws under way that become too old if they miss the next step."""
        seen = sorted(self.books.at(*UNDER_WAY), key=lambda one: one.born)
        in_time = self._in_time([one.born for one in seen])
        return [one.draw for one, there in zip(seen, in_time, strict=True) if not there]

    def _publishes(self, order: PublishWeights) -> None:
        """Checks that all engines get new weights at once, or those that nothing runs on."""
        wanted = () if self.options.interrupt else self._old()
        self.expect(set(order.engines) == set(wanted), f"engines {order.engines} get the new weights, not {wanted}")

    def _old(self) -> Sequence[int]:
        """Returns the engines that should serve the newest weights and don't; while responses run they need not, unless
        those are interrupted."""
        books = self.books
        old = [engine for engine, version in enumerate(books.served) if version != books.version]
        engines = {seen.request.engine for seen in books.at(PromptStage.RUNNING) if seen.request}
        busy = {*books.running.values(), *engines}  # some responses wait for their environments
        return [e for e in old if self.options.interrupt or e not in busy]

    # --- waiting --------------------------------------------------------------------------------

    def waits(self) -> None:
        super().waits()
        books = self.books
        if PublishWeights not in books.awaiting:
            old = self._old()
            self.expect(not old, f"engines {old} serve {books.served}, the trainer has {books.version}")
        if self.ending or books.stop or (books.awaiting and not self.pid.now):
            return
        self.expect(not self._could_train(), "nothing is trained although a step's groups are scored")
        if DrawPrompts in books.awaiting or not self.usable():
            return
        waiting = len(self.waiting)
        self.expect(not waiting, f"{waiting} prompts wait for nothing")
        if not (self.barrier or books.exhausted):
            live, most = self.live, self.wanted
            self.expect(live >= most, f"generation is {live} prompts ahead, it may be {most}")

    def _could_train(self) -> bool:
        books = self.books
        scored = books.count(PromptStage.SCORED)
        if books.awaiting.keys() & {Train, Evaluate, SaveCheckpoint} or not scored or self.left_out:
            return False
        enough = scored >= self.needed or (books.exhausted and scored == len(books.prompts))
        return enough and not self._late()
