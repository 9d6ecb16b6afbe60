"""The promises of policies that train in rounds: synchronous training, tail batching and APRIL."""

import math
from collections.abc import Sequence

from fluxjax.config import AprilConfig, Config, TailBatchingConfig
from fluxjax.coordinator.factory import make_parallelism
from fluxjax.coordinator.ledger import PromptStage
from fluxjax.coordinator.machine import Settings
from fluxjax.coordinator.messages import (
    Accumulate,
    DrawPrompts,
    Event,
    Generate,
    Instruction,
    Lend,
    Park,
    PublishWeights,
    Request,
    SetParallelism,
    Skip,
    Train,
    Trained,
)
from fluxjax.coordinator.policies.early_training import StreamTrainer
from fluxjax.coordinator.policies.rounds import NO_VARIANCE

from .base import Promises
from .books import UNDER_WAY, Seen

_SCORED = (PromptStage.SCORED, PromptStage.TRAINING)


class RoundPromises(Promises):
    """Checks that training goes in rounds: a round is open from its first `DrawPrompts` or `Generate` to its `Train`,
    nothing else begins in between, and engines serve the newest weights in it."""

    def __init__(self, config: Config, settings: Settings) -> None:
        super().__init__(config, settings)
        self.open = False
        self.planner = make_parallelism(config)
        self.degree = settings.degree
        self.stream = StreamTrainer() if config.stream_trainer else None
        self.looked = 0.0  # progress of the round when it was last asked whether engines can be lent
        self.lends = 0  # in this round
        self.parks = False  # the last instruction parked a prompt
        self.at_parks = 0.0  # progress before the first of these instructions
        self.dropped = 0  # groups of equal rewards, since the last step

    def goes_on(self) -> None:
        """Checks what is under way while the coordinator waits in a round; for subclasses."""

    @property
    def given_up(self) -> bool:
        """True if a stop ends the round as it is, because groups were dropped: others for them may be long in
        coming."""
        return bool(self.books.stop and self.dropped and self.short)

    @property
    def short(self) -> bool:
        """True while the round lacks scored groups."""
        return self.books.count(*_SCORED) < self.needed

    def heard(self, event: Event) -> None:
        if isinstance(event, Trained):
            self.dropped = 0
            if self.planner is not None:
                self.planner.next(int(event.metrics.get("rollout/preemptions", 0)))

    def said(self, instruction: Instruction) -> None:
        books = self.books
        if not self.parks:  # a parked prompt of which all samples wait for their environments is deferred at once
            self.at_parks = self.progress
        self.parks = isinstance(instruction, Park)
        fresh = isinstance(instruction, Generate) and not books.count(PromptStage.LOST)
        if fresh or isinstance(instruction, DrawPrompts):
            if not self.open:
                self.opens()
            self.expect(not self.given_up, "something begins although the run was stopped")
            jobs = books.awaiting.keys() - {Accumulate, Lend}
            self.expect(not jobs, "something begins while another job is under way")
        super().said(instruction)
        match instruction:
            case Train():
                self.open = False
                left = [seen.draw for seen in books.at(PromptStage.RUNNING)]
                self.expect(not left, f"draws {left} still run when the round is over")
            case PublishWeights(_, engines):
                self.open = False  # without a `Train` before it: nothing was left to train on
                self.expect(not engines or set(engines) == books.lent, f"only engines {engines} get the new weights")
            case Skip(_, reason):
                self.dropped += reason == NO_VARIANCE
            case SetParallelism(degree):
                self.degree = degree
            case Lend():
                self._lends(instruction)
            case Accumulate():
                self._accumulates(instruction)

    def opens(self) -> None:
        books = self.books
        self.open, self.looked, self.lends = True, 0.0, 0
        stale = {*books.served} != {books.version}
        self.expect(not stale, f"a round begins with versions {books.served}, not {books.version}")
        self.expect(not books.lent, f"a round begins while engines {books.lent} are lent")
        wanted = self.degree if self.planner is None else self.planner.degree
        # A prompt that was lost between two rounds is generated again at once, and is in the way.
        right = self.degree == wanted or books.count(PromptStage.RUNNING)
        self.expect(bool(right), f"a round begins with engines of {self.degree} devices, not {wanted}")
        self.expect(not self.ending, "a round begins although the run is over")

    def waits(self) -> None:
        super().waits()
        books = self.books
        if books.awaiting.keys() - {Accumulate, Lend}:
            return
        newest = min(books.served) == books.version
        self.expect(newest, f"engines serve {books.served}, the trainer has {books.version}")
        if self.given_up:
            running = 0 if books.awaiting or books.count(PromptStage.STOPPING) else books.count(PromptStage.RUNNING)
            self.expect(not running, f"{running} prompts still run although the run was stopped")
            return
        if not self.open and books.count(PromptStage.STOPPING):
            return  # what the last round left behind is waited for
        if not self.open and books.count(PromptStage.RUNNING, PromptStage.COMPLETE):  # a round that needs nothing new
            self.opens()
        self.expect(self.open, "nothing is begun")
        if not self.open:
            return
        self.goes_on()
        if self.stream is None or books.awaiting:
            return
        if len(books.served) > 1:
            self._may_lend(self.stream)
        if books.lent:
            ready = len(self.ready())
            idle = f"{ready} groups are ready, {len(books.lent)} engines lent for them do nothing"
            self.expect(ready < self.chunk, idle)

    # --- training before a round is over ----------------------------------------------------------

    def ready(self) -> Sequence[Seen]:
        """Returns the scored groups that this round will train on, whatever else becomes of it."""
        return self.books.at(PromptStage.SCORED)[: max(self.needed - self.books.count(PromptStage.TRAINING), 0)]

    @property
    def chunk(self) -> int:
        """The number of groups that lent engines are given at once."""
        return (self.stream.chunk if self.stream else 0) or math.ceil(self.needed / 8)

    @property
    def progress(self) -> float:
        """The share of the round's responses that have ended."""
        over = sum(seen.request.n for seen in self.books.at(PromptStage.COMPLETE, *_SCORED) if seen.request)
        running = self.books.at(PromptStage.RUNNING, PromptStage.STOPPING)
        launched = over + sum(seen.request.n for seen in running if seen.request)
        return (over + sum(len(seen.ended) for seen in running)) / max(launched, 1)

    def _may_lend(self, stream: StreamTrainer) -> None:
        """Checks that engines are lent at the first milestone where no cache can be too small."""
        progress = self.progress
        due = stream.first <= progress <= stream.last and progress - self.looked >= stream.every
        if due and not self.books.lent:
            self.looked = progress
            known = bool(self.settings.kv_tokens)
            self.expect(known, f"no engines are lent when {progress:.0%} of the responses have ended")

    def _lends(self, order: Lend) -> None:
        assert self.stream is not None
        engines, self.lends = len(self.books.served), self.lends + 1
        self.expect(self.lends == 1, "engines are lent twice in a round")
        self.expect(len(order.engines) == engines // 2, f"{len(order.engines)} of {engines} engines are lent")
        late = self.stream.first <= self.at_parks <= self.stream.last
        self.expect(late, f"engines are lent when {self.at_parks:.0%} of the responses have ended")

    def _accumulates(self, order: Accumulate) -> None:
        books = self.books
        self.expect(order.step == books.step + 1 and self.open, f"gradients of step {order.step} are computed")
        ready = [seen.draw for seen in self.ready()]
        draws = [group.prompt.draw for group in order.groups]
        wanted = ready[: self.chunk] if order.engines else ready
        self.expect(draws == wanted, f"gradients of draws {draws}, ready are {ready}")
        if order.engines:
            self.expect(set(order.engines) == books.lent, f"gradients on engines {order.engines}, lent: {books.lent}")
        else:
            self.expect(self.config.speculative_sync > 0, "gradients are computed early")
            self.expect(books.step > 0, "training begins early before anything was measured")


class SynchronousPromises(RoundPromises):
    """Checks that all prompts of a step are generated together, with as many responses as a group has, and all are
    trained on."""

    def launches(self, requests: Sequence[Request]) -> None:
        super().launches(requests)
        books = self.books
        self.expect(len(books.prompts) == self.needed or books.exhausted, f"{len(books.prompts)} prompts in a round")

    def said(self, instruction: Instruction) -> None:
        super().said(instruction)
        match instruction:
            case Park(prompt, _, keep):
                self.expect(keep and (self.stream is not None or self.given_up), f"draw {prompt.draw} is parked")
            case Train(_, groups):
                left = len(self.books.prompts) - len(groups) - self.books.count(PromptStage.TRAINING)
                self.expect(not left, f"{left} prompts of the round are left out")


class TailBatchingPromises(RoundPromises):
    """Checks that short rounds run in excess, and long rounds train on what they left behind (Flexes, section 3).
    `kinds` are the kinds of the rounds so far.

    With `max_staleness`, prompts that a long round finds deferred are generated beside the step's own prompts and
    `held`: a part of them joins this step, and a part each of the next ones, until they are that many versions old.
    """

    def __init__(self, config: Config, settings: Settings) -> None:
        super().__init__(config, settings)
        self.kinds: list[str] = []
        self.first: list[int] = []  # draws whose groups were complete (dynamic sampling: scored) first in this round
        assert isinstance(config.policy, TailBatchingConfig)
        self.policy = config.policy
        self.most = self.policy.max_staleness
        self.held: dict[int, int] = {}  # by draw, the version that its group is of
        self.joining: set[int] = set()  # those of `held` that are trained on in this step

    @property
    def long(self) -> bool:
        return self.kinds[-1] == "long"

    @property
    def needed_anew(self) -> int:
        """The number of groups that the step needs beside the held ones that join it."""
        return self.needed - len(self.joining & self.books.prompts.keys())

    def not_held(self, *stages: PromptStage) -> Sequence[Seen]:
        """Returns the prompts at these stages that are not held."""
        return [seen for seen in self.books.at(*stages) if seen.draw not in self.held]

    @property
    def held_unscored(self) -> Sequence[Seen]:
        held = [seen for draw, seen in self.books.prompts.items() if draw in self.held]
        return [seen for seen in held if seen.stage is not PromptStage.SCORED]

    @property
    def short(self) -> bool:
        return len(self.not_held(*_SCORED)) < self.needed_anew or bool(self.held_unscored)

    @property
    def wanted(self) -> int:
        return self.needed_anew if self.long else math.ceil(self.eta("prompts") * self.needed_anew)

    @property
    def live(self) -> int:
        return len(self.not_held(PromptStage.WAITING, *UNDER_WAY, *_SCORED))

    @property
    def room(self) -> int:
        return self.wanted - self.live - len(self._again())

    @property
    def launched(self) -> int:
        return math.ceil((1.0 if self.long else self.eta("responses")) * self.settings.group_size)

    @property
    def oldest(self) -> int:
        """The weight version from which a response goes on: only responses on engines that were lent do."""
        return self.books.version if self.books.lent else self.books.version + 1

    def eta(self, name: str) -> float:
        return self.scheduled(f"tail_{name}", getattr(self.policy, name))

    def opens(self) -> None:
        """Checks that a long round comes as soon as a step's worth of deferred prompts waits, and when the data
        ends."""
        super().opens()
        deferred = self.books.count(PromptStage.DEFERRED)
        self.kinds.append("long" if deferred >= self.needed or self.books.exhausted else "short")
        self.first = []
        if self.long and self.most and not self.books.exhausted:
            first = self.books.at(PromptStage.DEFERRED)[: self.needed]
            self.held |= {seen.draw: self.books.version for seen in first}
        self.joining = self._share()

    def _share(self) -> set[int]:
        """Returns the held draws that join this step: oldest first, in equal parts, before they are too old; once the
        data ends, as many as there is room for."""
        here = [draw for draw in self.held if draw in self.books.prompts]
        oldest_first = sorted(here, key=lambda draw: (self.held[draw], draw))
        steps = [self.held[draw] + self.most - self.books.version + 1 for draw in oldest_first]  # left, with this one
        self.expect(all(left > 0 for left in steps), f"of held draws {oldest_first}, some are too old")
        parts = [math.ceil(count / max(left, 1)) for count, left in enumerate(steps, 1)]
        part = self.needed if self.books.exhausted else max(parts, default=0)
        return set(oldest_first[: min(part, self.needed)])

    def _won(self) -> int:
        """Returns the number of groups that count as complete."""
        return len(self.not_held(*_SCORED, *(() if self.dynamic else (PromptStage.COMPLETE,))))

    def launches(self, requests: Sequence[Request]) -> None:
        """Checks that all prompts begin together, once all are drawn: those that will be held; deferred ones, oldest
        first, in a long round or when there are no new ones; new ones."""
        if any(request.begun for request in requests):
            return
        books, draws = self.books, [request.prompt.draw for request in requests]
        held, again, new = self._held_back(), self._again(), [seen.draw for seen in books.at(PromptStage.WAITING)]
        missing = 0 if self._won() >= self.needed_anew else max(self.wanted - self.live, 0)
        wanted = [*held, *again[:missing], *new]
        self.expect(draws == wanted, f"draws {draws} are launched, not {wanted}")
        undrawn = 0 if books.exhausted else missing - len(again)
        self.expect(undrawn <= 0, f"draws {draws} are launched, and {undrawn} are not drawn yet")

    def _held_back(self) -> list[int]:
        return [seen.draw for seen in self.books.at(PromptStage.DEFERRED) if seen.draw in self.held]

    def _again(self) -> list[int]:
        """Returns the deferred prompts that this round may launch in the place of new ones."""
        return [seen.draw for seen in self.not_held(PromptStage.DEFERRED) if self.long or self.books.exhausted]

    def heard(self, event: Event) -> None:
        super().heard(event)
        stages = (PromptStage.SCORED, *(() if self.dynamic else (PromptStage.COMPLETE,)))
        for seen in self.books.at(*stages):
            known = seen.draw in self.first or seen.draw in self.held
            if not known and (not self.dynamic or seen.varied(self.varied_by)):
                self.first.append(seen.draw)

    def said(self, instruction: Instruction) -> None:
        if isinstance(instruction, Train) and not self.open:  # a round of held groups alone
            self.opens()
        super().said(instruction)
        match instruction:
            case Park(keep=False):
                self._puts_off(self.books.prompts[instruction.prompt.draw])
            case Train():
                self._wins(instruction)
                self.held = {draw: born for draw, born in self.held.items() if draw not in self.joining}
                self.joining = set()

    def _puts_off(self, seen: Seen) -> None:
        self.expect(self._won() >= self.needed_anew, f"draw {seen.draw} is put off before the round is won")
        self.expect(seen.draw not in self.held, f"draw {seen.draw} is put off although it is held")
        if seen.stage is PromptStage.RUNNING:
            self.expect(not self.long, f"draw {seen.draw} is cut off in a long round")
        if seen.stage is PromptStage.SCORED:
            lower = [scored for scored in self.not_held(PromptStage.SCORED) if scored.draw < seen.draw]
            winners = len(lower) + len(self.not_held(PromptStage.TRAINING))
            self.expect(winners >= self.needed_anew, f"draw {seen.draw} is put off for one that was drawn after it")

    def _wins(self, order: Train) -> None:
        """Checks that the first groups to be complete win, and that all other prompts are kept for a long round. If the
        coordinator had to await something else when the round was won (a draw, engines that were lent), more groups
        were complete then, and any of them may win."""
        books = self.books
        joining, later = self.joining & books.prompts.keys(), self.held.keys() - self.joining
        kept = {seen.draw for seen in books.at(PromptStage.DEFERRED)} | (later & books.prompts.keys())
        draws = {group.prompt.draw for group in order.groups} | {seen.draw for seen in books.at(PromptStage.TRAINING)}
        self.expect(kept | draws == set(books.prompts), f"of {sorted(books.prompts)}, {sorted(kept)} are kept")
        self.expect(
            draws & self.held.keys() == joining, f"of those held, {sorted(joining)} are to join {sorted(draws)}"
        )
        first = self.first if self.dynamic or self.lends else self.first[: self.needed_anew]
        self.expect(draws - joining <= set(first), f"draws {sorted(draws)} win, complete were first {first}")

    def goes_on(self) -> None:
        books = self.books
        if books.awaiting:
            return
        if self._won() < self.needed_anew:
            wait = books.exhausted and not books.count(PromptStage.DEFERRED)
            self.expect(wait or self.live >= self.wanted, f"{self.live} prompts are under way, not {self.wanted}")
            return
        if self.held_unscored:
            return
        running = books.count(PromptStage.RUNNING)
        self.expect(not running, f"{running} prompts are waited for although the round is won")
        scored = len(self.not_held(*_SCORED))
        pending = books.count(PromptStage.STOPPING) or scored < self.needed_anew
        self.expect(bool(pending), "nothing is trained although the round is won")


class AprilPromises(RoundPromises):
    """Checks that more prompts are under way than a step needs, and that begun responses go on."""

    def __init__(self, config: Config, settings: Settings) -> None:
        super().__init__(config, settings)
        assert isinstance(config.policy, AprilConfig)
        self.policy = config.policy

    @property
    def oldest(self) -> int:
        """The oldest version that may be trained on now."""
        return self.books.version - self.policy.max_staleness

    @property
    def wanted(self) -> int:
        return math.ceil(self.policy.oversample * self.needed)

    def launches(self, requests: Sequence[Request]) -> None:
        """Checks that everything that waits is generated at once. The policy's order, by predicted lengths, is not
        checked."""
        draws, waiting = {request.prompt.draw for request in requests}, {seen.draw for seen in self.waiting}
        self.expect(draws == waiting, f"draws {sorted(draws)} are generated, {sorted(waiting)} wait")

    def said(self, instruction: Instruction) -> None:
        super().said(instruction)
        match instruction:
            case DrawPrompts():
                scored = self.books.count(*_SCORED)
                self.expect(scored < self.needed, "prompts are drawn although the step has all its groups")
            case Park(prompt, keep=False):
                seen = self.books.prompts[prompt.draw]
                late = seen.stage is PromptStage.SCORED and seen.born < self.oldest
                self.expect(late, f"draw {seen.draw} ({seen.stage.value}, born under {seen.born}) is begun anew")
            case Train():
                self._oldest_first(instruction)

    def _oldest_first(self, order: Train) -> None:
        candidates = sorted(self.books.at(*_SCORED), key=_born_first)
        wanted = {seen.draw for seen in candidates[: self.needed]}
        draws = {group.prompt.draw for group in order.groups} | {s.draw for s in self.books.at(PromptStage.TRAINING)}
        self.expect(draws == wanted, f"draws {sorted(draws)} are trained on, the oldest are {sorted(wanted)}")
        missed = self.books.at(PromptStage.STOPPING, PromptStage.COMPLETE)
        late = [seen.draw for seen in missed if seen.born <= self.oldest]
        self.expect(not late, f"draws {late} become too old by missing this step")

    def ready(self) -> Sequence[Seen]:
        first = sorted(self.books.prompts.values(), key=_born_first)[: self.needed]
        return [seen for seen in first if seen.stage is PromptStage.SCORED]

    def goes_on(self) -> None:
        books = self.books
        if Lend in books.awaiting:
            return
        idle = len(self.waiting)
        self.expect(not idle, f"{idle} prompts wait for nothing")
        scored = books.count(*_SCORED)
        enough = scored if self.dynamic else scored + books.count(PromptStage.COMPLETE)
        if scored < self.needed and not books.exhausted:
            self.expect(self.live >= self.wanted, f"{self.live} prompts under way, not {self.wanted}")
        if books.awaiting:
            return
        running = books.at(PromptStage.RUNNING, PromptStage.STOPPING)
        grows = bool(running) and (enough < self.needed or any(seen.born <= self.oldest for seen in running))
        complete = books.at(PromptStage.COMPLETE)
        judged = bool(complete) and (scored < self.needed or any(seen.born <= self.oldest for seen in complete))
        self.expect(grows or judged, "nothing is trained although the round has all that it needs")


def _born_first(seen: Seen) -> tuple[int, int]:
    return seen.born, seen.draw
