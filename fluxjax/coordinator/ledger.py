"""The books of the coordinator: the stage of every prompt and every response of the run.

A prompt is drawn, waits, is generated, has its responses scored, and is then either trained on exactly once or skipped
with a reason. The runtime's reports may be late, repeated or about an attempt that was given up. These reports change
only the counts of `ignored`. Any other contradiction is a `CoordinatorError`, which ends the run.
"""

import collections
import dataclasses
import enum
from collections.abc import Iterable, Sequence

from ..base.types import Group, Prompt, Response, Reward, Sample, has_variance
from .messages import ABORTED, STOPPED, Park, Request, Turn, response_id


class CoordinatorError(RuntimeError):
    """A message to or from the coordinator contradicts the coordinator's books."""

    before: Sequence[str] = ()  # the last lines of the coordinator's log

    def __str__(self) -> str:
        lines = [f"\n  {line}" for line in self.before]
        return super().__str__() + "".join(["\nthe last that was heard and said:", *lines] if lines else [])


class RunGivenUp(CoordinatorError):
    """No further step can be completed, because of the data, a reward or the engines. The message says in one line what
    a user can mend. The books have no contradiction."""

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class PromptStage(enum.Enum):
    __hash__ = object.__hash__  # faster than an enum's hash of its name, and entries are stored by stage
    WAITING = "waiting"  # drawn, and on no engine yet
    DEFERRED = "deferred"  # parked, and on no engine until the policy generates it again
    RUNNING = "running"  # an engine still generates its responses, or an environment answers one
    STOPPING = "stopping"  # parked; the engine has yet to hand over the tokens generated so far
    LOST = "lost"  # this attempt can't complete: its engine failed, or a response was aborted
    COMPLETE = "complete"  # all responses have arrived, some rewards have not
    SCORED = "scored"  # all responses and rewards have arrived
    TRAINING = "training"


@dataclasses.dataclass
class Entry:
    """A prompt from its draw to its training or skip. `responses` and `rewards` make up the prompt's group, and `begun`
    has the tokens of aborted responses. `acting` has the responses whose last turn waits for its environment, and
    `observed` those that wait for their next turn. The keys of these dictionaries are samples."""

    prompt: Prompt
    stage: PromptStage = PromptStage.WAITING
    n: int = 0  # responses that were started
    need: int = 0  # the number of started responses that the group gets
    attempt: int = -1
    failures: int = 0  # lost attempts
    failure: str = ""  # why the last attempt was lost
    engine: int = 0
    born: int = -1  # version that the engine served when the oldest response began
    responses: dict[int, Response] = dataclasses.field(default_factory=dict)
    rewards: dict[int, Reward] = dataclasses.field(default_factory=dict)
    begun: dict[int, Response] = dataclasses.field(default_factory=dict)
    acting: dict[int, Response] = dataclasses.field(default_factory=dict)
    observed: dict[int, Response] = dataclasses.field(default_factory=dict)
    heard: dict[int, Response] = dataclasses.field(default_factory=dict)  # with which a later turn began
    scored: Group | None = None  # the group, once it is scored
    varied: bool = False  # whether the scored group has differing rewards

    def complete(self, varied_in: str) -> None:
        """Makes the group from all responses and rewards, and compares the field `varied_in` of the rewards."""
        samples = tuple(Sample(self.responses[i], self.rewards[i]) for i in sorted(self.responses))
        self.scored = Group(self.prompt, samples).packed()
        self.varied = has_variance(self.scored, varied_in)

    def group(self) -> Group:
        assert self.scored is not None
        return self.scored

    def so_far(self) -> tuple[Response | None, ...]:
        """Returns the generated part of each response, for `Request.begun`; empty if no response has begun."""
        kept = tuple(self.responses.get(i) or self.begun.get(i) for i in range(self.n))
        return kept if any(kept) else ()

    def between_turns(self) -> dict[int, Response]:
        """Returns the responses that no engine generates now, as aborted responses. If such a response goes on behind a
        turn that ended, the turn ends again at once."""
        return {sample: dataclasses.replace(r, finish=ABORTED) for sample, r in (self.acting | self.observed).items()}

    def saved(self) -> dict[int, Response]:
        """Returns the responses that have not ended, for a checkpoint, up to the turn that an engine generates."""
        heard = {sample: dataclasses.replace(r, finish=ABORTED) for sample, r in self.heard.items()}
        begun = heard | self.between_turns() | self.begun
        return {sample: begun[sample] for sample in sorted(begun.keys() - self.responses.keys())}

    def before(self, sample: int) -> int:
        """Returns the number of tokens with which the present turn of a response began."""
        return self.heard[sample].num_tokens if sample in self.heard else 0

    @property
    def longest(self) -> int:
        """The tokens of the longest ended response; 0 if none has ended."""
        return max((response.num_tokens for response in self.responses.values()), default=0)

    def park(self, *, keep: bool = False) -> Park:
        return Park(self.prompt, self.attempt, keep)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A prompt that was not trained on, and the reason."""

    draw: int
    id: str
    source: str
    reason: str


class Ledger:
    """The books that the module's docstring describes. Policies read the books; only the `Coordinator` writes."""

    def __init__(self, varied_in: str = "correct") -> None:
        self._varied_in = varied_in  # the field of rewards that dynamic sampling compares
        self.entries: dict[int, Entry] = {}  # by draw: prompts neither trained nor skipped yet
        # ended responses without a `Score` instruction yet, by rid, in order of arrival
        self.unscored: dict[str, Response] = {}
        self.unacted: dict[str, Response] = {}  # responses with an ended turn and no `Act` instruction yet, by rid
        self.unturned: dict[str, Response] = {}  # responses with an observation and no `Continue` instruction yet
        self.surplus: dict[str, None] = {}  # in order, rids that still run although their group is complete
        self.last_draw = -1
        self.drawn = 0  # prompts; always equals trained + skipped + live
        self.trained = 0  # prompts
        self.trained_responses = 0
        self.skipped: list[Skipped] = []
        self.skipped_in_a_row = 0  # prompts that could not be prepared, in `draw` calls since the last usable prompt
        # scored groups skipped since the last step, by source and by the reward of the group's first response
        self.dropped: collections.Counter[tuple[str, float]] = collections.Counter()
        self.dropped_in_a_row = 0  # scored groups skipped since the last group whose rewards differ
        self.accepted = 0  # complete responses that were accepted
        self.epochs: dict[int, int] = {}  # number of prompts trained on, by epoch
        self.ignored: collections.Counter[str] = collections.Counter()  # late and repeated reports, by kind
        self._stages: dict[PromptStage, dict[int, Entry]] = {stage: {} for stage in PromptStage}
        self._scoring: set[str] = set()  # rids whose reward has yet to arrive

    # --- reading --------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """The number of prompts that are drawn and neither trained on nor skipped yet."""
        return len(self.entries)

    def at(self, *stages: PromptStage) -> list[Entry]:
        """Returns the prompts at these stages, stage after stage, each stage in draw order."""
        return [entry for stage in stages for _, entry in sorted(self._stages[stage].items())]

    def count(self, *stages: PromptStage) -> int:
        total = 0
        for stage in stages:  # a loop for speed: each event of a run asks several times
            total += len(self._stages[stage])
        return total

    @property
    def awaits_something(self) -> bool:
        """True while an engine owes a response, an environment an answer, or the scorer a reward."""
        return bool(self._scoring or self._stages[PromptStage.RUNNING] or self._stages[PromptStage.STOPPING])

    def between_turns(self, engines: Sequence[int]) -> bool:
        """Says whether a response that one of these engines will go on with is between two turns."""
        running = self._stages[PromptStage.RUNNING].values()
        return any((entry.acting or entry.observed) and entry.engine in engines for entry in running)

    # --- facts ----------------------------------------------------------------------------------

    def draw(self, prompts: Sequence[Prompt], skipped: Sequence[tuple[Prompt, str]]) -> None:
        draws = sorted([p.draw for p in prompts] + [p.draw for p, _ in skipped])
        if draws and (draws[0] <= self.last_draw or len(set(draws)) != len(draws)):
            raise CoordinatorError(f"draws {draws} must all differ and be greater than the last draw, {self.last_draw}")
        self.drawn += len(draws)
        self.last_draw = draws[-1] if draws else self.last_draw
        self.skipped_in_a_row = 0 if prompts else self.skipped_in_a_row + len(skipped)
        for prompt in prompts:
            self.entries[prompt.draw] = self._stages[PromptStage.WAITING][prompt.draw] = Entry(prompt)
        for prompt, reason in skipped:
            self.skipped.append(Skipped(prompt.draw, prompt.id, prompt.source, reason))

    def finish(self, response: Response, newest_version: int) -> bool:
        """Enters a response that has ended, or whose turn has ended. Returns False if the end of this turn was entered
        before. Raises `CoordinatorError` for a token of an unpublished version."""
        _, newest = response.version_span
        if newest > newest_version:
            raise CoordinatorError(
                f"response {response.rid} has tokens of version {newest}, "
                f"but {newest_version} is the newest one published"
            )
        entry = self._current(response.rid, "response")
        if entry is None:
            return True
        sample = response.sample
        if response.rid != response_id(response.draw, entry.attempt, sample):
            raise CoordinatorError(
                f"response {response.rid} is said to be sample {sample} of draw {response.draw}, but its id differs"
            )
        if sample in entry.acting or sample in entry.observed or response.num_tokens < entry.before(sample):
            self.ignored["repeated turn"] += 1
            return False
        if sample in entry.responses or (entry.stage is PromptStage.STOPPING and sample in entry.begun):
            self.ignored["repeated response"] += 1
        elif entry.stage not in (PromptStage.RUNNING, PromptStage.STOPPING):
            self.surplus.pop(response.rid, None)
            self.ignored["surplus response"] += 1
        elif entry.prompt.environment and response.finish == STOPPED:
            self._turn_ended(entry, response)
        elif response.finish != ABORTED:
            self._accept(entry, response)
        elif entry.stage is PromptStage.STOPPING:
            entry.begun[sample] = response
            self._stopped(entry)
        else:
            self._lose(entry, "a response was aborted")
        return True

    def observe(self, response: Response, done: bool) -> Entry | None:
        """Enters an observation behind the last turn of a response. Returns the entry if the response is complete now,
        else None. Raises `CoordinatorError` for a response that does not begin with the earlier turns."""
        entry = self._current(response.rid, "observation")
        if entry is None:
            return None
        before = entry.acting.get(response.sample)
        waits = entry.stage is PromptStage.RUNNING and before is not None and before.rid not in self.unacted
        if before is None or not waits or response.num_tokens < before.num_tokens:  # fewer tokens: of an earlier turn
            self.ignored["late observation"] += 1
            return None
        count = before.num_tokens
        if response.token_ids[:count] != before.token_ids or response.versions[:count] != before.versions:
            raise CoordinatorError(f"the observation of response {response.rid} follows other tokens than its turns")
        del entry.acting[response.sample]
        if done:
            self._accept(entry, response)
            return entry
        entry.observed[response.sample] = self.unturned[response.rid] = response
        return None

    def environment_fails(self, rid: str, reason: str) -> bool:
        """Enters that the environment of a response failed. Returns whether this loses the prompt's attempt."""
        entry = self._current(rid, "failure of an environment")
        _, _, sample = _parse(rid)
        if entry is None:
            return False
        if entry.stage is not PromptStage.RUNNING or sample not in entry.acting:
            self.ignored["late failure of an environment"] += 1
            return False
        self._lose(entry, reason)
        return True

    def reward(self, rid: str, reward: Reward) -> Entry | None:
        """Enters the reward of a response. Returns the entry if its group is completely scored now, else None."""
        draw, _, sample = _parse(rid)
        entry = self.entries.get(draw)
        response = entry.responses.get(sample) if entry is not None else None
        if entry is None or response is None or response.rid != rid:
            if self._current(rid, "reward") is not None:
                raise CoordinatorError(f"a reward came for response {rid}, but no reward of it was asked for")
        elif sample in entry.rewards:
            self.ignored["repeated reward"] += 1
        elif rid not in self._scoring:
            raise CoordinatorError(f"a reward came for response {rid}, but no reward of it was asked for")
        else:
            self._scoring.discard(rid)
            entry.rewards[sample] = reward
            if entry.stage is PromptStage.COMPLETE and len(entry.rewards) == entry.need:
                self._scored(entry)
                return entry
        return None

    def fail(self, request_ids: Iterable[str], reason: str) -> None:
        """Enters that the engine lost these requests. A request whose responses have all arrived is unaffected."""
        for request in request_ids:
            entry = self._current(f"{request}/0", "failure")
            if entry is not None and entry.stage in (PromptStage.RUNNING, PromptStage.STOPPING):
                self._lose(entry, reason)
            elif entry is not None:
                self.ignored["late failure"] += 1

    def train_done(self) -> None:
        for entry in self.at(PromptStage.TRAINING):
            self._remove(entry)
            self.trained += 1
            self.trained_responses += len(entry.responses)
            self.epochs[entry.prompt.epoch] = self.epochs.get(entry.prompt.epoch, 0) + 1

    # --- decisions ------------------------------------------------------------------------------

    def generate(self, request: Request, served: int) -> None:
        """Enters that a request begins on an engine with weight version `served`."""
        entry = self._at(request.prompt, PromptStage.WAITING, PromptStage.DEFERRED, PromptStage.LOST)
        need = request.need or request.n
        if request.attempt != entry.attempt + 1 or not 1 <= need <= request.n:
            raise CoordinatorError(
                f"{request} must be attempt {entry.attempt + 1} of its prompt and need 1 to {request.n} responses"
            )
        if not request.begun:
            self._forget(entry)
            entry.born = served
        elif request.begun != entry.so_far() or request.n != entry.n:
            raise CoordinatorError(
                f"request {request.rid} must continue the responses that its prompt has begun, but continues others"
            )
        entry.n, entry.need, entry.attempt, entry.engine = request.n, need, request.attempt, request.engine
        entry.begun, entry.heard = {}, {i: r for i, r in enumerate(request.begun) if r and r.finish == ABORTED}
        self._move(entry, PromptStage.RUNNING)

    def park(self, order: Park) -> None:
        also = () if order.keep else (PromptStage.COMPLETE, PromptStage.SCORED)
        entry = self._at(order.prompt, PromptStage.RUNNING, *also)
        if order.attempt != entry.attempt:
            raise CoordinatorError(
                f"request {order.request} can't be parked: attempt {entry.attempt} is the newest one of its prompt"
            )
        if order.keep:
            self._move(entry, PromptStage.STOPPING)
            entry.begun |= entry.between_turns()
            self._end_turns(entry)
            self._stopped(entry)
        else:
            self._forget(entry)
            self._move(entry, PromptStage.DEFERRED)

    def act(self, response: Response) -> None:
        if self.unacted.pop(response.rid, None) is None:
            raise CoordinatorError(f"response {response.rid} has no turn that its environment has not heard")

    def next_turn(self, turn: Turn) -> None:
        """Enters that a response goes on behind its observation."""
        entry, response = self._at(turn.prompt, PromptStage.RUNNING), turn.response
        if self.unturned.pop(response.rid, None) != response or turn.engine != entry.engine:
            raise CoordinatorError(
                f"response {response.rid} can't go on on engine {turn.engine}: it has no new observation, or its "
                "earlier turns are elsewhere"
            )
        del entry.observed[response.sample]
        entry.heard[response.sample] = response

    def score(self, response: Response) -> None:
        if self.unscored.pop(response.rid, None) is None:
            raise CoordinatorError(f"response {response.rid} has not come, or was given out for scoring before")
        self._scoring.add(response.rid)

    def train(self, groups: Sequence[Group]) -> None:
        """Enters that these groups' gradients are computed, now or later in the step; `train_done` ends the step."""
        for group in groups:
            entry = self._at(group.prompt, PromptStage.SCORED)
            if group != entry.group():
                raise CoordinatorError(f"draw {entry.prompt.draw}: its group differs from the group that was scored")
            self._move(entry, PromptStage.TRAINING)

    def skip(self, prompt: Prompt, reason: str) -> None:
        entry = self._at(prompt, PromptStage.WAITING, PromptStage.DEFERRED, PromptStage.LOST, PromptStage.SCORED)
        if entry.stage is PromptStage.SCORED:
            self.dropped[prompt.source, entry.group().samples[0].reward.value] += 1
            self.dropped_in_a_row += 1
        self._remove(entry)
        self.skipped.append(Skipped(prompt.draw, prompt.id, prompt.source, reason))

    # --- inside ---------------------------------------------------------------------------------

    def _at(self, prompt: Prompt, *stages: PromptStage) -> Entry:
        entry = self.entries.get(prompt.draw)
        if entry is None or entry.stage not in stages:
            where = "not in flight" if entry is None else entry.stage.value
            raise CoordinatorError(f"draw {prompt.draw} is {where}; it must be {' or '.join(s.value for s in stages)}")
        return entry

    def _current(self, rid: str, kind: str) -> Entry | None:
        """Returns a response's entry, None if its report is late. Raises `CoordinatorError` for an unknown `rid`."""
        draw, attempt, sample = _parse(rid)
        entry = self.entries.get(draw)
        if entry is None:
            if draw > self.last_draw:
                raise CoordinatorError(f"{kind} {rid}: draw {draw} was never drawn")
            self.ignored[f"late {kind}"] += 1
            return None
        if attempt > entry.attempt or (attempt == entry.attempt and sample >= entry.n):
            raise CoordinatorError(f"{kind} {rid}: no such request was made")
        if attempt < entry.attempt or entry.stage in (PromptStage.LOST, PromptStage.WAITING, PromptStage.DEFERRED):
            self.ignored[f"late {kind}"] += 1
            return None
        return entry

    def _turn_ended(self, entry: Entry, response: Response) -> None:
        if entry.stage is PromptStage.STOPPING:
            entry.begun[response.sample] = dataclasses.replace(response, finish=ABORTED)
            self._stopped(entry)
        else:
            entry.acting[response.sample] = self.unacted[response.rid] = response

    def _end_turns(self, entry: Entry) -> None:
        for response in (entry.acting | entry.observed).values():
            self.unacted.pop(response.rid, None)
            self.unturned.pop(response.rid, None)
        entry.acting, entry.observed = {}, {}

    def _accept(self, entry: Entry, response: Response) -> None:
        self.accepted += 1
        entry.responses[response.sample] = response
        self.unscored[response.rid] = response
        if len(entry.responses) == entry.need:
            if entry.stage is PromptStage.RUNNING:
                ids = [response_id(entry.prompt.draw, entry.attempt, i) for i in range(entry.n)]
                self.surplus |= dict.fromkeys(rid for i, rid in enumerate(ids) if i not in entry.responses)
            entry.begun = {}
            self._end_turns(entry)
            self._move(entry, PromptStage.COMPLETE)
        else:
            self._stopped(entry)

    def _scored(self, entry: Entry) -> None:
        self._move(entry, PromptStage.SCORED)
        entry.complete(self._varied_in)
        if entry.varied:
            self.dropped_in_a_row = 0

    def _stopped(self, entry: Entry) -> None:
        """Defers a parked prompt as soon as all of its started responses have arrived."""
        if entry.stage is PromptStage.STOPPING and len(entry.responses) + len(entry.begun) == entry.n:
            self._move(entry, PromptStage.DEFERRED)

    def _lose(self, entry: Entry, reason: str) -> None:
        self._forget(entry)
        entry.failures, entry.failure = entry.failures + 1, reason
        self._move(entry, PromptStage.LOST)

    def _forget(self, entry: Entry) -> None:
        for response in entry.responses.values():
            self.unscored.pop(response.rid, None)
            self._scoring.discard(response.rid)
        self._end_turns(entry)
        entry.responses, entry.rewards, entry.begun, entry.heard, entry.scored = {}, {}, {}, {}, None

    def _move(self, entry: Entry, stage: PromptStage) -> None:
        del self._stages[entry.stage][entry.prompt.draw]
        entry.stage = stage
        self._stages[stage][entry.prompt.draw] = entry

    def _remove(self, entry: Entry) -> None:
        del self._stages[entry.stage][entry.prompt.draw]
        del self.entries[entry.prompt.draw]

    def restore(self, entry: Entry) -> None:
        """Enters a prompt of an earlier process of the run (`ledger_state`)."""
        self.entries[entry.prompt.draw] = self._stages[entry.stage][entry.prompt.draw] = entry
        if entry.stage is PromptStage.SCORED:
            entry.complete(self._varied_in)
        for sample, response in entry.responses.items():
            if sample not in entry.rewards:
                self.unscored[response.rid] = response


def _parse(rid: str) -> tuple[int, int, int]:
    request, _, sample = rid.partition("/")
    draw, _, attempt = request.partition(".")
    try:
        numbers = int(draw), int(attempt), int(sample)
    except ValueError:
        numbers = -1, -1, -1
    if response_id(*numbers) == rid and min(numbers) >= 0:
        return numbers
    raise CoordinatorError(f"{rid!r} is no response id of this run")
