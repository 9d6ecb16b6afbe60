"""The promises of every policy, whatever else it does: see `Promises`."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from fluxjax.base.types import ENVIRONMENT, Group
from fluxjax.config import Config
from fluxjax.coordinator.factory import make_schedules
from fluxjax.coordinator.ledger import PromptStage
from fluxjax.coordinator.machine import Coordinator, Settings
from fluxjax.coordinator.messages import (
    Abort,
    Accumulate,
    Act,
    Continue,
    DrawPrompts,
    Evaluate,
    Event,
    Finish,
    Generate,
    Instruction,
    PublishWeights,
    Request,
    SaveCheckpoint,
    Score,
    Skip,
    Train,
    Trained,
    Turn,
)
from fluxjax.coordinator.policies.rounds import NO_VARIANCE

from .books import UNDER_WAY, Books, Seen


def misplaced(coordinator: Coordinator, trained: Sequence[int]) -> Counter[int]:
    """Counts the draws that are not in one place: trained on, skipped, or still in the ledger. A run that did not end
    well may have a step under way."""
    ledger = coordinator.ledger
    training = not coordinator.finished and len(trained) > ledger.trained
    places = Counter(trained) + Counter(skipped.draw for skipped in ledger.skipped)
    places += Counter(draw for draw in ledger.entries if not training or draw not in places)
    places.subtract(range(ledger.drawn))
    return Counter({draw: count for draw, count in places.items() if count})


class Promises:
    """Watches one run and checks the promises of its policy: hand `see` every event before, and every instruction after
    the coordinator has it, and `wrong` has a line for each promise that was broken.

    A promise is checked at one of two moments. `said`: an instruction is said (`books` are as they were before it).
    `waits`: the coordinator has said all that it has to say and waits. Then something must be under way that will end,
    and nothing that was promised to be done at once may be left.

    The numbers that a policy promises are properties here, which subclasses override: `wanted`, `live`, `launched` and
    `oldest`.
    """

    def __init__(self, config: Config, settings: Settings) -> None:
        self.config, self.settings = config, settings
        self.dynamic, self.varied_by = bool(config.rollout.dynamic_sampling), settings.dynamic_sampling_by.value
        self.books = Books(settings.engines)
        self.schedules = make_schedules(config)
        self._scored: list[Group] = []  # since the temperature of a prompt was last asked for
        self.wrong: list[str] = []
        self.evaluated: list[tuple[int, bool]] = []
        self.saved: list[int] = []

    @property
    def needed(self) -> int:
        """The number of prompts in a step."""
        return self.settings.prompts_per_step

    @property
    def wanted(self) -> int:
        """The number of prompts that are to be under way, or to wait to be trained on."""
        return self.needed

    @property
    def live(self) -> int:
        """The number of prompts that are under way, or wait to be trained on."""
        return len(self.books.prompts)

    @property
    def launched(self) -> int:
        """The number of responses that a group is begun with."""
        return self.settings.group_size

    @property
    def oldest(self) -> int:
        """The oldest weight version under which a waiting response may have begun and still goes on where it was; an
        older response begins anew."""
        return self.books.version

    @property
    def ending(self) -> bool:
        """True if no further step will be begun."""
        books = self.books
        return books.step >= self.settings.steps or (books.exhausted and not books.prompts)

    def expect(self, holds: bool, promise: str) -> None:
        if not holds:
            self.wrong.append(f"step {self.books.step + 1}: {promise}")

    def scheduled(self, name: str, otherwise: float | str) -> float:
        """Returns the value of a schedule at this step; `otherwise` if there is no such schedule."""
        schedule = self.schedules.get(name)
        return float(otherwise) if schedule is None else schedule.value(self._progress)

    def _learn(self) -> None:
        """Has schedules learn from scored groups by draw, whichever was scored first."""
        scored, self._scored = sorted(self._scored, key=lambda group: group.prompt.draw), []
        for group in scored:
            for schedule in self.schedules.values():
                schedule.observe_group(group)

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
        scored = self.books.hear(what)
        self.heard(what)
        if scored is not None:
            self._scored.append(scored.group())
        if isinstance(what, Trained):
            for schedule in self.schedules.values():
                schedule.observe(what.metrics)

    def heard(self, event: Event) -> None:
        """Handles an event that `books` know already; for subclasses."""

    def said(self, instruction: Instruction) -> None:
        books = self.books
        match instruction:
            case DrawPrompts(count):
                self.expect(count == self.room, f"{count} prompts are drawn, {self.room} are missing")
            case PublishWeights(version):
                self.expect(version == books.version, f"version {version} is published")
            case Score(response):
                self.expect(response.rid in books.unscored, f"{response.rid} is scored out of turn")
            case Abort(rid):
                self._aborts(rid)
            case Act(response):
                self.expect(response.rid in books.unacted, f"the environment of {response.rid} hears a turn twice")
            case Continue(turns):
                self._continues(turns)
            case Generate(requests):
                self._generates(requests)
            case Skip():
                self._skips(instruction)
            case Accumulate(_, groups):
                self._learns(groups)
            case Train():
                self._trains(instruction)
            case Evaluate(step, full):
                self.evaluated.append((step, full))
                self.expect(step == books.step, f"evaluation {step}")
            case SaveCheckpoint(step):
                self.saved.append(step)
                self.expect(step == books.step, f"checkpoint {step}")
            case Finish():
                self._finishes(instruction)

    def waits(self) -> None:
        books = self.books
        acting = any(seen.acting for seen in books.prompts.values())
        under_way = books.awaiting or books.running or books.scoring or acting
        self.expect(bool(under_way), "it waits, and nothing will ever come")
        self.expect(not books.unacted, f"no environment was told of turns that ended: {sorted(books.unacted)}")
        observed = [seen.draw for seen in books.prompts.values() if seen.observed]
        self.expect(not observed, f"responses do not go on behind their observations: draws {observed}")
        self.expect(not books.unscored, f"whole responses are not scored: {sorted(books.unscored)}")
        self.expect(not books.surplus, f"responses nobody needs go on: {sorted(books.surplus)}")
        self.expect(not books.count(PromptStage.LOST), "a lost prompt is neither generated again nor given up")
        if self.dynamic:
            equal = [seen.draw for seen in books.at(PromptStage.SCORED) if not seen.varied(self.varied_by)]
            self.expect(not equal, f"groups of equal rewards are kept: draws {equal}")

    # --- single promises ------------------------------------------------------------------------

    def _aborts(self, rid: str) -> None:
        """Checks that only what nobody needs is aborted: responses beyond those of a complete group, and the rest of a
        lost request."""
        seen = self.books.of(rid)
        lost = seen is not None and seen.stage is PromptStage.LOST and seen.request and seen.request.rid == rid
        self.expect(bool(lost) or rid in self.books.surplus, f"{rid} is aborted although it is needed")

    def _continues(self, turns: Sequence[Turn]) -> None:
        """Checks that responses go on behind their newest observations, where their earlier turns were generated."""
        for prompt, response, engine in [(turn.prompt, turn.response, turn.engine) for turn in turns]:
            seen = self.books.prompts[prompt.draw]
            right = seen.observed.get(response.sample) == response
            self.expect(right, f"{response.rid} goes on with something else than it observed")
            right = seen.request is not None and seen.request.engine == engine and engine not in self.books.lent
            self.expect(right, f"{response.rid} goes on on engine {engine}, which is not that of its earlier turns")

    def _skips(self, order: Skip) -> None:
        """Checks that only prompts are skipped that failed too often or, with dynamic sampling, have equal rewards."""
        seen = self.books.prompts[order.prompt.draw]
        if order.reason == NO_VARIANCE:
            allowed = self.dynamic and seen.stage is PromptStage.SCORED and not seen.varied(self.varied_by)
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
        self._learns(order.groups)
        if self.dynamic:
            equal = [draw for draw in draws if not books.prompts[draw].varied(self.varied_by)]
            self.expect(not equal, f"draws {equal} are trained on although nothing can be learnt from them")
        self.expect(not self.left_out, f"{self.left_out} was left out")

    def _learns(self, groups: Sequence[Group]) -> None:
        """Checks that groups are complete, and that versions grow within a response and are not too old."""
        oldest = self.books.version - (self.config.policy.staleness_limit or 0)
        for group in groups:
            samples = [sample.response.sample for sample in group.samples]
            whole = len(set(samples)) == len(samples) == self.settings.group_size
            self.expect(whole, f"draw {group.prompt.draw} is trained on with samples {samples}")
            for response in (sample.response for sample in group.samples):
                versions = [version for version in response.versions if version != ENVIRONMENT]
                grow = bool(versions) and all(before <= after for before, after in pairwise(versions))
                right = grow and oldest <= versions[0] <= versions[-1] <= self.books.version
                self.expect(right, f"response {response.rid} of versions {sorted(set(versions))} is trained on")

    @property
    def left_out(self) -> str:
        """The evaluation or checkpoint that must come before the next step and was not asked for yet; empty if there is
        none."""
        step, settings = self.books.step, self.settings

        def due(every: int) -> bool:
            return bool(every) and step % every == 0

        if (step == 0 or due(settings.evaluate_every)) and step not in {evaluated for evaluated, _ in self.evaluated}:
            return "an evaluation"
        return "a checkpoint" if step and due(settings.checkpoint_every) and step not in self.saved else ""

    def _generates(self, requests: Sequence[Request]) -> None:
        """Checks that a lost prompt is generated before all others, alone."""
        books = self.books
        lost = [seen.draw for seen in books.at(PromptStage.LOST)]
        if lost:
            draws = [request.prompt.draw for request in requests]
            self.expect(draws == lost[:1], f"draws {draws} are generated, {lost} were lost")
        else:
            self.launches(requests)
        awake = set(range(len(books.served))) - books.lent
        usable = awake if lost else awake & set(self.usable())
        running = list(books.running.values())
        for request in requests:
            seen, engine = books.prompts[request.prompt.draw], request.engine
            self.expect(engine in usable, f"{request.rid} goes to engine {engine}, which is not to be used now")
            if seen.request is not None and seen.stage is PromptStage.LOST:
                self.expect(seen.failures < self.settings.max_attempts, f"draw {seen.draw} is not given up")
                elsewhere = awake - {seen.request.engine}
                self.expect(not elsewhere or engine in elsewhere, f"{request.rid} goes where it was lost")
            elif engine in running:
                idle = usable - set(running)
                self.expect(not idle, f"{request.rid} goes to engine {engine}, but {sorted(idle)} have nothing to do")
            self._begins(seen, request)
            running += [engine] * request.n

    @property
    def room(self) -> int:
        """The number of prompts to draw."""
        return self.wanted - self.live

    def launches(self, requests: Sequence[Request]) -> None:
        """Checks that waiting prompts are generated in this order: deferred ones, then new ones."""
        draws = [request.prompt.draw for request in requests]
        waiting = [seen.draw for seen in self.waiting]
        self.expect(draws == waiting, f"draws {draws} are generated, {waiting} wait")

    @property
    def waiting(self) -> Sequence[Seen]:
        return [*self.books.at(PromptStage.DEFERRED), *self.books.at(PromptStage.WAITING)]

    def usable(self) -> Sequence[int]:
        """Returns the engines that may get new requests."""
        return range(len(self.books.served))

    def _begins(self, seen: Seen, request: Request) -> None:
        """Checks that a group is generated again, or goes on, as it was; else as the policy launches groups. All its
        tokens have one temperature: that of the step in which it was begun."""
        before, attempt, size = seen.request, -1, (self.launched, self.settings.group_size)
        if before is not None:
            attempt = before.attempt
            size = (before.n, before.need) if request.begun or seen.stage is PromptStage.LOST else size
        n, need, temperature = request.n, request.need, request.temperature
        self.expect(request.attempt == attempt + 1, f"{request.rid} follows attempt {attempt}")
        self.expect((n, need) == size, f"{request.rid} launches {n} responses for {need}, not {size[0]} for {size[1]}")
        goes_on = bool(seen.kept()) and seen.born >= self.oldest
        self.expect(bool(request.begun) == goes_on, f"{request.rid} {'begins anew' if goes_on else 'goes on'}")
        if not request.begun:
            self._learn()
        schedule = self.schedules.get("temperature")
        right = None if schedule is None else schedule.value(self._progress, seen.prompt)
        if request.begun:
            self.expect(request.begun == seen.kept(), f"{request.rid} goes on with something else than it had")
            right = next(response for response in request.begun if response is not None).temperature
        self.expect(temperature == right, f"{request.rid} has temperature {temperature}, not {right}")

    def _finishes(self, order: Finish) -> None:
        """Checks that a run ends when its steps are done, its data is exhausted, or it was told to; everything due must
        have been evaluated and saved."""
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
