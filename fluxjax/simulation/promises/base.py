"""What every policy promises, whatever else it does: see `Promises`."""

from __future__ import annotations

from collections.abc import Sequence

from ...config import Config
from ...coordinator.factory import make_schedules
from ...coordinator.ledger import PromptStage
from ...coordinator.machine import Settings
from ...coordinator.messages import (
    Abort,
    Evaluate,
    Event,
    Finish,
    Generate,
    Instruction,
    Park,
    Request,
    RewardReady,
    SaveCheckpoint,
    Score,
    Skip,
    Train,
    Trained,
)
from ...coordinator.policies.rounds import NO_VARIANCE
from .books import UNDER_WAY, Books, Seen


class Promises:
    """One run, watched: tell `see` every event before, and every instruction after the coordinator was handed it, and
    `wrong` has a line for each promise that was broken.

    A promise is checked at one of two moments. `said`: an instruction is said (`books` are as they were before it).
    `waits`: the coordinator has said all that it has to say and waits. Then something must be under way that will end,
    and nothing that was promised to be done at once may be left.
    """

    def __init__(self, config: Config, settings: Settings) -> None:
        self.config, self.settings = config, settings
        self.dynamic = config.policy.dynamic_sampling
        self.books = Books(settings.engines)
        self.schedules = make_schedules(config.schedules)
        self.wrong: list[str] = []
        self.evaluated: list[tuple[int, bool]] = []
        self.saved: list[int] = []

    @property
    def needed(self) -> int:
        """Prompts of a step."""
        return self.settings.prompts_per_step

    @property
    def ending(self) -> bool:
        """No further step will be begun."""
        books = self.books
        return books.step >= self.settings.steps or (books.exhausted and not books.prompts)

    def expect(self, holds: bool, promise: str) -> None:
        if not holds:
            self.wrong.append(f"step {self.books.step + 1}: {promise}")

    def scheduled(self, name: str, otherwise: float) -> float:
        """A value of this step."""
        schedule = self.schedules.get(name)
        return otherwise if schedule is None else schedule.value(self._progress)

    @property
    def _progress(self) -> float:
        return self.books.step / max(self.settings.steps - 1, 1)

    # --- watching -------------------------------------------------------------------------------

    def see(self, what: Event | Instruction) -> None:
        if not isinstance(what, Event):
            self.said(what)
            self.books.say(what)
            return
        if self.books.version >= 0 and not self.books.finished:
            self.waits()
        before = self._scored(what)
        self.books.hear(what)
        self.heard(what)
        if before is not None and before.stage is PromptStage.SCORED:
            for schedule in self.schedules.values():
                schedule.observe_group(before.group())
        if isinstance(what, Trained):
            for schedule in self.schedules.values():
                schedule.observe(what.metrics)

    def _scored(self, event: Event) -> Seen | None:
        """The prompt whose group may be scored by this event."""
        seen = self.books.prompts.get(int(event.rid.partition(".")[0])) if isinstance(event, RewardReady) else None
        return seen if seen is not None and seen.stage is PromptStage.COMPLETE else None

    def heard(self, event: Event) -> None:
        """For subclasses: `books` know the event."""

    def said(self, instruction: Instruction) -> None:
        match instruction:
            case Score(response):
                self.expect(response.rid in self.books.unscored, f"{response.rid} is scored out of turn")
            case Abort(rid):
                self._aborts(rid)
            case Generate(requests):
                self._generates(requests)
            case Skip():
                self._skips(instruction)
            case Train():
                self._trains(instruction)
            case Evaluate(step, full):
                self.evaluated.append((step, full))
                self.expect(step == self.books.step, f"evaluation {step}")
            case SaveCheckpoint(step):
                self.saved.append(step)
                self.expect(step == self.books.step, f"checkpoint {step}")
            case Finish():
                self._finishes(instruction)

    def waits(self) -> None:
        books = self.books
        self.expect(bool(books.awaiting or books.running or books.scoring), "it waits, and nothing will ever come")
        self.expect(not books.unscored, f"whole responses are not scored: {sorted(books.unscored)}")
        self.expect(not books.surplus, f"responses nobody needs go on: {sorted(books.surplus)}")
        self.expect(not books.count(PromptStage.LOST), "a lost prompt is neither generated again nor given up")
        if self.dynamic:
            equal = [seen.draw for seen in books.at(PromptStage.SCORED) if not seen.varied()]
            self.expect(not equal, f"groups of equal rewards are kept: draws {equal}")

    # --- single promises ------------------------------------------------------------------------

    def _aborts(self, rid: str) -> None:
        """Only what nobody needs: responses beyond those of a complete group, and what is left of a lost request."""
        seen = self.books.prompts.get(int(rid.partition(".")[0]))
        lost = (
            seen is not None and seen.stage is PromptStage.LOST and seen.request is not None and seen.request.rid == rid
        )
        self.expect(lost or rid in self.books.surplus, f"{rid} is aborted although it is needed")

    def _skips(self, order: Skip) -> None:
        """Nothing is given up but what failed too often, and with dynamic sampling what has equal rewards."""
        seen = self.books.prompts[order.prompt.draw]
        if order.reason == NO_VARIANCE:
            allowed = self.dynamic and seen.stage is PromptStage.SCORED and not seen.varied()
        else:
            allowed = seen.stage is PromptStage.LOST and seen.failures == self.settings.max_attempts
            allowed = allowed and order.reason.startswith(f"failed {seen.failures} times")
        self.expect(allowed, f"draw {seen.draw} ({seen.stage.value}) is skipped: {order.reason}")

    def _trains(self, order: Train) -> None:
        books = self.books
        groups = len(order.groups) + books.count(PromptStage.TRAINING)
        self.expect(
            groups == self.needed or (groups < self.needed and books.exhausted), f"{groups} groups are trained on"
        )
        self.expect(order.step == books.step + 1, f"step {order.step} is trained")
        draws = [group.prompt.draw for group in order.groups]
        self.expect(draws == sorted(draws), f"draws {draws} are trained on in this order")
        if self.dynamic:
            equal = [draw for draw in draws if not books.prompts[draw].varied()]
            self.expect(not equal, f"draws {equal} are trained on although nothing can be learnt from them")
        every = self.settings.evaluate_every
        due = books.step == 0 or (every and books.step % every == 0)
        self.expect(not due or books.step in {step for step, _ in self.evaluated}, "an evaluation was left out")
        every = self.settings.checkpoint_every
        due = every and books.step and books.step % every == 0
        self.expect(not due or books.step in self.saved, "a checkpoint was left out")

    def _generates(self, requests: Sequence[Request]) -> None:
        running = list(self.books.running.values())
        for request in requests:
            seen, engine = self.books.prompts[request.prompt.draw], request.engine
            attempt = -1 if seen.request is None else seen.request.attempt
            self.expect(request.attempt == attempt + 1, f"{request.rid} follows attempt {attempt}")
            self.expect(engine not in self.books.lent, f"{request.rid} goes to engine {engine}, which is lent")
            awake = set(range(len(self.books.served))) - self.books.lent
            usable = awake if seen.stage is PromptStage.LOST else awake & set(self.usable())
            if seen.stage is PromptStage.LOST:
                self._again(seen, request, awake)
            elif engine in running:
                idle = usable - set(running)
                self.expect(not idle, f"{request.rid} goes to engine {engine}, but {sorted(idle)} have nothing to do")
            self.expect(engine in usable, f"{request.rid} goes to engine {engine}, which is not to be used now")
            self._begins(seen, request)
            running += [engine] * request.n

    def usable(self) -> Sequence[int]:
        """Engines that may get new requests."""
        return range(len(self.books.served))

    def _again(self, seen: Seen, request: Request, awake: set[int]) -> None:
        assert seen.request is not None
        before, options = seen.request, self.settings
        self.expect(seen.failures < options.max_attempts, f"draw {seen.draw} is not given up")
        self.expect((request.n, request.need) == (before.n, before.need), f"{request.rid} is another group")
        elsewhere = awake - {before.engine}
        self.expect(not elsewhere or request.engine != before.engine, f"{request.rid} goes where it was lost")

    def _begins(self, seen: Seen, request: Request) -> None:
        """One temperature for all tokens of a group: that of the step in which it was begun."""
        if request.begun:
            self.expect(request.begun == seen.kept(), f"{request.rid} goes on with something else than it had")
            first = next(response for response in request.begun if response is not None)
            self.expect(request.temperature == first.temperature, f"{request.rid} goes on at another temperature")
            return
        schedule = self.schedules.get("temperature")
        wanted = None if schedule is None else schedule.value(self._progress, seen.prompt)
        self.expect(request.temperature == wanted, f"{request.rid} has temperature {request.temperature}, not {wanted}")

    def _finishes(self, order: Finish) -> None:
        """A run ends when its steps are done, or its data is, or when it was told to; all in the right places were
        evaluated and saved."""
        books, steps = self.books, self.settings.steps
        self.expect(not (books.awaiting or books.count(*UNDER_WAY[:2])), "the run ends while something is under way")
        self.expect(order.step == books.step, f"{order.step} steps were done")
        if not order.complete:
            self.expect(bool(books.stop) and self.saved[-1:] == [books.step], f"the run ends: {order.reason}")
            return
        self.expect(self.ending, f"the run ends after {books.step} of {steps} steps: {order.reason}")
        full = [step for step, full in self.evaluated if full]
        self.expect(full == ([0, books.step] if books.step else [0]), f"evaluated in full at {full}")
        evaluated = {step for step, _ in self.evaluated}
        self.expect(evaluated == set(self._cadence(self.settings.evaluate_every)) | {0}, f"evaluated at {evaluated}")
        self.expect(self.saved == self._cadence(self.settings.checkpoint_every), f"saved at {self.saved}")

    def _cadence(self, every: int) -> list[int]:
        last = self.books.step
        return sorted({last, *(range(every, last + 1, every) if every else ())})

    # --- for subclasses -------------------------------------------------------------------------

    def parks_to_end(self, order: Park) -> bool:
        """What still runs when the run ends keeps what it has."""
        return order.keep and bool(self.ending or self.books.stop)

    def goes_on(self, seen: Seen, request: Request, oldest: int) -> None:
        """What was begun under weights of at least version `oldest` goes on where it was; what is older begins anew."""
        if seen.stage is not PromptStage.LOST:
            wanted = bool(seen.kept()) and seen.born >= oldest
            self.expect(bool(request.begun) == wanted, f"{request.rid} {'begins anew' if wanted else 'goes on'}")
