"""The coordinator: a pure state machine. Events go in, instructions come out.

No I/O, no clock, no threads, no randomness. Three parts share the work:

- the `Ledger` knows where every prompt and response is,
- the `Coordinator` below enters events and instructions into the books and refuses what contradicts them,
- a `SchedulingPolicy` reads the books and decides what to do next. Each policy is a file of its own in `policies/`.

The runtime (asyncio, or a simulation on virtual time) carries the instructions out and reports what happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..base.types import Prompt, Response
from ..config.schedules import RunSchedule
from .dropped import Dropped
from .engines import Fleet
from .ledger import ABORTED, CoordinatorError, Ledger, PromptStage
from .lengths.predictor import LengthPredictor
from .messages import (
    Abort,
    Accumulate,
    Accumulated,
    CheckpointSaved,
    DrawPrompts,
    EngineFailed,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Generate,
    Instruction,
    Lend,
    Lent,
    ParallelismSet,
    Park,
    PromptsDrawn,
    PublishWeights,
    ResponseFinished,
    RewardReady,
    SaveCheckpoint,
    Score,
    SetParallelism,
    Skip,
    Started,
    StopRequested,
    Tick,
    Train,
    Trained,
    WeightsPublished,
    request_id,
)
from .pace import Pace
from .parallelism import ParallelismPlanner
from .run_settings import Settings

T = TypeVar("T")


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Decides; never changes the books itself. Called after every event, again and again until it says nothing."""

    def decide(self, coordinator: Coordinator) -> Sequence[Instruction]:
        """The next instructions, all possible in the state as it is; empty: wait for events."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable; what the policy remembers from step to step."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Coordinator:
    """See the module's docstring. Everything public here is for policies and displays to read."""

    def __init__(
        self,
        settings: Settings,
        policy: SchedulingPolicy,
        schedules: Mapping[str, RunSchedule] | None = None,
        parallelism: ParallelismPlanner | None = None,
    ) -> None:
        """`schedules` are values that change during the run, by the names of `SchedulesConfig`'s fields. `parallelism`
        says how many devices an engine is to have, from the `rollout/preemptions` of each step; None: they stay."""
        self.settings = settings
        self.schedules = dict(schedules or {})
        self.policy = policy
        self.ledger = Ledger()
        self.fleet = Fleet(settings.engines, settings.degree, settings.kv_tokens)
        self.parallelism = parallelism
        self.lengths = LengthPredictor(limit=settings.max_new_tokens)
        self.pace = Pace()
        self.step = 0  # optimizer steps done
        self.version = -1  # of the weights that the trainer holds; -1 before the start
        self.metrics: Mapping[str, float] = {}  # of the last step
        self.awaiting: dict[type, Instruction] = {}  # instructions not answered yet, at most one of each of `_ANSWERED`
        self.exhausted = False  # the data has no more prompts
        self.stop_reason = ""  # why someone wants the run to stop
        self.failure = ""  # why the run can't go on; it is then stopped, and raises this when it would have finished
        self.finished: Finish | None = None
        self.now = 0.0  # seconds, as of the last tick
        self._evaluated = (-1, False)  # step and whether it was a full evaluation
        self._saved = -1  # step of the last checkpoint

    # --- reading --------------------------------------------------------------------------------

    @property
    def served(self) -> int:
        """The oldest version of the weights that engines serve; -1 before the start."""
        return self.fleet.oldest

    @property
    def ending(self) -> str:
        """Why no further step will be begun; empty while there is one to do. Only meaningful between steps."""
        if self.step >= self.settings.steps:
            return f"all {self.settings.steps} steps are done"
        return "the data is exhausted" if self.exhausted and not self.ledger.live else ""

    def scheduled(self, name: str, otherwise: T, prompt: Prompt | None = None) -> float | T:
        """What a schedule says at this step (of a prompt); `otherwise`, without such a schedule."""
        schedule = self.schedules.get(name)
        return otherwise if schedule is None else schedule.value(self.step / max(self.settings.steps - 1, 1), prompt)

    def expected_tokens(self, prompt: Prompt) -> float:
        """Tokens that a response to it is predicted to have."""
        return self.lengths.predict(prompt).mean

    @property
    def evaluated_step(self) -> int:
        """After how many steps the last evaluation was made; -1: none yet."""
        return self._evaluated[0]

    def evaluation_due(self) -> Evaluate | None:
        """What to evaluate before the next step: at step 0 and the end in full, in between every n steps."""
        every = self.settings.evaluate_every
        full = self.step == 0 or bool(self.ending)
        if not full and not (every and self.step % every == 0):
            return None
        step, was_full = self._evaluated
        done = step == self.step and (was_full or not full)
        return None if done else Evaluate(self.step, full)

    def checkpoint_due(self) -> SaveCheckpoint | None:
        """What to save before the next step: every n steps and at the end, however it comes."""
        every = self.settings.checkpoint_every
        due = self.ending or self.stop_reason or (every and self.step and self.step % every == 0)
        return SaveCheckpoint(self.step) if due and self._saved != self.step else None

    # --- events in, instructions out ------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event in and returns what to do now, in this order.

        Responses and rewards may come late or twice; those change nothing. Raises `CoordinatorError` for an event
        that can't be true, and for a policy that would break the books or wait for nothing.
        """
        if self.finished:
            return []
        self._enter(event)
        if self.served < 0:
            return []  # not started yet
        said: list[Instruction] = []
        while not self.finished and (decided := self.policy.decide(self)):
            for instruction in decided:
                self._commit(instruction)
            said += decided
        if not (self.finished or self.awaiting or self.ledger.awaits_something):
            raise CoordinatorError(f"after {event}, {type(self.policy).__name__} waits although nothing is under way")
        return said

    def _enter(self, event: Event) -> None:
        ledger = self.ledger
        match event:
            case Started():
                if self.served >= 0:
                    raise CoordinatorError("started twice")
                self.fleet.publish(event.version, range(len(self.fleet)))
                # A resumed trainer may be ahead of freshly started engines: the policy publishes first.
                self.version = event.version if self.version < 0 else self.version
            case PromptsDrawn():
                self._enter_prompts(event)
            case ResponseFinished():
                self._enter_response(event.response)
            case RewardReady():
                if (scored := ledger.reward(event.rid, event.reward)) is not None:
                    for schedule in self.schedules.values():
                        schedule.observe_group(scored.group())
            case EngineFailed():
                ledger.fail(event.request_ids, event.reason)
                for request in event.request_ids:
                    self.fleet.end(request)
                    self.pace.lose(request)
            case Trained():
                if event.version <= self.version:
                    raise CoordinatorError(f"trained version {event.version} after version {self.version}")
                self.step = self._answered(Train, event).step
                self.version, self.metrics = event.version, event.metrics
                for schedule in self.schedules.values():
                    schedule.observe(event.metrics)
                self.pace.trained(self.now)
                if self.parallelism is not None:
                    self.parallelism.next(int(event.metrics.get("rollout/preemptions", 0)))
                ledger.train_done()
            case Accumulated():
                self.pace.trained(self.now)
                self._check("step", event.step, self._answered(Accumulate, event).step)
            case Lent():
                order = self._answered(Lend, event)
                if event.engines != order.engines:
                    raise CoordinatorError(f"engines {event.engines} were lent, {order.engines} were to be")
            case ParallelismSet():
                self._check("degree", event.degree, self._answered(SetParallelism, event).degree)
                before = self.fleet
                self.fleet = Fleet(event.engines, event.degree, event.kv_tokens or before.kv_tokens)
                self.fleet.publish(before.oldest, range(event.engines))
            case WeightsPublished():
                order = self._answered(PublishWeights, event)
                self._check("version", event.version, order.version)
                self.fleet.publish(event.version, order.engines or range(len(self.fleet)))
            case Evaluated():
                self._check("step", event.step, self._answered(Evaluate, event).step)
            case CheckpointSaved():
                self._check("step", event.step, self._answered(SaveCheckpoint, event).step)
            case StopRequested():
                self.stop_reason = self.stop_reason or event.reason or "stopped"
            case Tick():
                self.now = event.now

    def _enter_response(self, response: Response) -> None:
        entry = self.ledger.entries.get(response.draw)
        self.ledger.finish(response, max(self.version, self.fleet.newest))
        self.pace.end(response.rid, len(response.token_ids), self.now)
        request, _, sample = response.rid.partition("/")
        if self.fleet.end_sample(request, int(sample)) and entry is not None:
            self.lengths.observe(entry.prompt, len(response.token_ids), response.finish != ABORTED)

    def _enter_prompts(self, event: PromptsDrawn) -> None:
        count = self._answered(DrawPrompts, event).count
        if len(event.prompts) > count:
            raise CoordinatorError(f"{len(event.prompts)} prompts drawn, {count} asked for")
        self.ledger.draw(event.prompts, event.skipped)
        # A source may replace what it skips, or leave that to us; too few of both together means the end.
        self.exhausted = len(event.prompts) + len(event.skipped) < count
        if self.ledger.skipped_in_a_row >= self.settings.max_skipped_in_a_row:
            raise CoordinatorError(
                f"{self.ledger.skipped_in_a_row} prompts in a row could not be prepared, the last one because: "
                f"{self.ledger.skipped[-1].reason}"
            )

    def _answered(self, kind: type[Any], event: Event) -> Any:
        if kind not in self.awaiting:
            raise CoordinatorError(f"{event} answers no {kind.__name__} under way")
        return self.awaiting.pop(kind)

    @staticmethod
    def _check(what: str, got: int, wanted: int) -> None:
        if got != wanted:
            raise CoordinatorError(f"{what} {got} was reported done, {what} {wanted} was asked for")

    def _commit(self, instruction: Instruction) -> None:
        ledger = self.ledger
        match instruction:
            case Generate():
                for request in instruction.requests:
                    ledger.generate(request, self.fleet.served[request.engine])
                    self.fleet.begin(request, self.expected_tokens(request.prompt))
                    self.pace.begin(request, self.now)
            case Park():
                entry = ledger.entries.get(instruction.prompt.draw)
                ledger.park(instruction)
                if entry is not None and not instruction.keep:
                    self.fleet.end(request_id(entry.prompt.draw, entry.attempt))
            case Abort():
                ledger.abort(instruction.rid)
            case Score():
                ledger.score(instruction.response)
            case Skip():
                ledger.skip(instruction.prompt, instruction.reason)
                self._check_dropped()
            case Lend():
                self._lend(instruction)
            case Accumulate():
                self._check("step", instruction.step, self.step + 1)
                if not instruction.groups or not self.fleet.lent.issuperset(instruction.engines):
                    raise CoordinatorError(f"{len(instruction.groups)} groups on engines {instruction.engines}")
                ledger.train(instruction.groups)
                self.pace.train(() if instruction.engines else instruction.groups, self.now)
            case Train():
                self._check("step", instruction.step, self.step + 1)
                if Accumulate in self.awaiting:
                    raise CoordinatorError(f"{instruction} before the gradients asked for earlier are there")
                ledger.train(instruction.groups)
                ledger.dropped.groups.clear()
                if not ledger.count(PromptStage.TRAINING):
                    raise CoordinatorError(f"step {instruction.step} has nothing to train on")
                self.pace.train(instruction.groups, self.now)
            case SetParallelism():
                if self.awaiting or ledger.count(PromptStage.RUNNING, PromptStage.STOPPING):
                    raise CoordinatorError(f"{instruction} while something is under way")
            case Evaluate():
                self._evaluated = (instruction.step, instruction.full)
            case SaveCheckpoint():
                # Now, not when it is saved: the checkpoint itself must say that this step has one.
                self._saved = instruction.step
            case Finish():
                if ledger.count(PromptStage.RUNNING, PromptStage.STOPPING) or self.awaiting:
                    raise CoordinatorError(f"finished with {ledger.live} prompts and {len(self.awaiting)} jobs open")
                if self.failure:
                    raise CoordinatorError(self.failure)
                self.finished = instruction
            case DrawPrompts() | PublishWeights():
                pass
        if type(instruction) in _ANSWERED:
            if type(instruction) in self.awaiting:
                raise CoordinatorError(f"{instruction} while another one is under way")
            self.awaiting[type(instruction)] = instruction

    def _check_dropped(self) -> None:
        """A run that finds nothing to learn from is stopped: what was trained so far is worth a checkpoint."""
        kept = self.ledger.count(PromptStage.SCORED, PromptStage.TRAINING)
        complaint = self.ledger.dropped.complaint(self.step + 1, kept, self.settings)
        if complaint and not self.stop_reason:
            self.stop_reason = self.failure = complaint

    def _lend(self, order: Lend) -> None:
        left = set(range(len(self.fleet))) - self.fleet.lent - set(order.engines)
        busy = [entry.prompt.draw for entry in self.ledger.at(PromptStage.RUNNING) if entry.engine in order.engines]
        if not order.engines or not left or busy:
            raise CoordinatorError(
                f"engines {order.engines} can't be lent: draws {busy} run there, {len(left) or 'none'} is left"
            )
        self.fleet.lent.update(order.engines)

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable; everything that decides the rest of the run. Taken when `SaveCheckpoint` is said; raises
        `CoordinatorError` while a step is trained."""
        if Train in self.awaiting:
            raise CoordinatorError(f"step {self.step + 1} is being trained: state is taken between steps")
        ledger = self.ledger.state_dict()
        if self.failure:  # whoever mends the reward begins to count anew
            ledger["dropped"] = Dropped().state_dict()
        return {
            "step": self.step,
            "version": self.version,
            "evaluated": list(self._evaluated),
            "saved": self._saved,
            "ledger": ledger,
            "lengths": self.lengths.state_dict(),
            "schedules": {name: schedule.state_dict() for name, schedule in self.schedules.items()},
            "parallelism": self.parallelism.state_dict() if self.parallelism is not None else {},
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], prompts: Mapping[int, Prompt] | None = None) -> None:
        """Continues where `state` was taken. Call before `Started`; the settings may have changed since. `prompts` are
        those of `state["ledger"]["entries"]`, by draw."""
        if self.served >= 0:
            raise CoordinatorError("state can only be loaded before the start")
        self.step = state["step"]
        self.version = state["version"]
        step, full = state["evaluated"]
        self._evaluated = (step, full)
        self._saved = state["saved"]
        self.ledger.load_state_dict(state["ledger"], prompts or {})
        if "lengths" in state:  # not in checkpoints of earlier releases
            self.lengths.load_state_dict(state["lengths"])
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(state.get("schedules", {}).get(name, {}))
        if self.parallelism is not None and state.get("parallelism"):
            self.parallelism.load_state_dict(state["parallelism"])
        self.policy.load_state_dict(state["policy"])


_ANSWERED = frozenset({DrawPrompts, Lend, Accumulate, Train, PublishWeights, SetParallelism, Evaluate, SaveCheckpoint})
