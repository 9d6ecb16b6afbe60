"""The coordinator: a pure state machine. Events go in, instructions come out.

No I/O, no clock, no threads, no randomness. Three parts share the work:

- the `Ledger` holds the stage of every prompt and response,
- the `Coordinator` below enters events and instructions into the books and refuses contradictions,
- a `SchedulingPolicy` reads the books and decides the next instructions. Each policy is a file in `policies/`.

The runtime (asyncio, or a simulation on virtual time) carries the instructions out and reports the results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeVar, runtime_checkable

from ..base.types import Group, Prompt, SavedState, State
from ..config.schedules import RunSchedule
from . import messages
from .engine_states import EngineStates, Pace, ParallelismPlanner
from .ledger import CoordinatorError, Ledger, PromptStage, RunGivenUp
from .ledger_state import NOTHING_DROPPED, ledger_state, load_ledger_state
from .lengths import LengthPredictor
from .messages import Handlers
from .run_settings import Settings

T = TypeVar("T")
I = TypeVar("I", bound=messages.Instruction)  # noqa: E741

_SHOWN = [PromptStage.WAITING, PromptStage.DEFERRED, PromptStage.RUNNING, PromptStage.COMPLETE, PromptStage.SCORED]
_LINES = 12  # lines of the log that an error shows


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Decides the next instructions, and never changes the books."""

    def decide(self, coordinator: Coordinator) -> Sequence[messages.Instruction]:
        """Returns the next instructions, all possible in the present state. The coordinator asks again after every
        event, until no instruction is returned."""
        ...

    def state_dict(self) -> State:
        """Returns what the policy remembers from step to step."""
        ...

    def load_state_dict(self, state: SavedState) -> None: ...


class Coordinator:
    """The state machine that the module's docstring describes. Policies and displays read its public attributes."""

    def __init__(
        self,
        settings: Settings,
        policy: SchedulingPolicy,
        schedules: Mapping[str, RunSchedule] | None = None,
        parallelism: ParallelismPlanner | None = None,
    ) -> None:
        """`schedules` are values that change during the run, by the names of `make_schedules`. `parallelism` chooses
        the number of devices of an engine, from each step's `rollout/preemptions`; None keeps it."""
        self.settings = settings
        self.schedules = dict(schedules or {})
        self._scored: list[Group] = []  # groups that the schedules have not learned from yet
        self.policy = policy
        self.ledger = Ledger(settings.dynamic_sampling_by.value)
        self.fleet = EngineStates(settings.engines, settings.degree, settings.kv_tokens)
        self.parallelism = parallelism
        self.lengths = LengthPredictor(limit=settings.max_new_tokens)
        self.pace = Pace()
        self.step = 0  # training steps done
        self.version = -1  # the version of the trainer's weights; -1 before the start
        self.metrics: Mapping[str, float] = {}  # the last step's metrics
        # The instructions that no event has answered yet, at most one of each type of `ANSWERED`.
        self.awaiting: dict[type[messages.Instruction], messages.Instruction] = {}
        self.exhausted = False  # the data has no more prompts
        self.stop_reason = ""  # why the run is asked to stop; "": no request
        self.failure = ""  # why the run can't go on: the run stops, and raises this error instead of finishing
        self.finished: messages.Finish | None = None
        self.now = 0.0  # seconds, as of the last tick
        # The last messages, each with the step under way and the time, for the text of an error.
        self._log: deque[tuple[int, float, messages.Message]] = deque(maxlen=_LINES)
        self._last_evaluation = (-1, False)  # the step, and whether it was a full evaluation
        self._saved = -1  # step of the last checkpoint
        self._dropped = 0  # groups of equal rewards since the start or resume

    # --- reading --------------------------------------------------------------------------------

    @property
    def served(self) -> int:
        """The oldest version of the weights that engines serve; -1 before the start."""
        return self.fleet.oldest

    @property
    def ending(self) -> str:
        """Why no further step will begin; empty while there is a step to do. Only meaningful between steps."""
        if self.step >= self.settings.steps:
            return f"all {self.settings.steps} steps are done"
        return "the data is exhausted" if self.exhausted and not self.ledger.live else ""

    def scheduling(self) -> dict[str, float]:
        """Returns what the policy has decided: prompts by stage, groups that were dropped as they teach nothing, the
        engines' devices and work, the error of predicted lengths, and the numbers of the policy's `metrics`, if it has
        this method."""
        stages = {stage.value: self.ledger.count(stage) for stage in _SHOWN}
        fleet = {
            "degree": self.fleet.degree,
            "lent": len(self.fleet.lent),
            "running_responses": sum(self.fleet.running),
        }
        books = {"dropped": self._dropped, "length_error": self.lengths.error}
        found = stages | fleet | books | getattr(self.policy, "metrics", dict)()
        return {f"scheduling/{name}": float(value) for name, value in found.items()}

    @property
    def progress(self) -> float:
        """The progress of the run: 0 at the first step and 1 at the last."""
        return self.step / max(self.settings.steps - 1, 1)

    def work_of(self, prompt: Prompt) -> float:
        """Returns the work of an engine with a prompt before the first response, in generated tokens."""
        return self.settings.prompt_work * (prompt.tokens + self.settings.patch_tokens * prompt.patches)

    def scheduled(self, name: str, otherwise: T, prompt: Prompt | None = None) -> float | T:
        """Returns the value of the schedule `name` at this step (for a prompt); `otherwise` without that schedule."""
        if prompt is not None:
            self._learn_scored()
        schedule = self.schedules.get(name)
        return otherwise if schedule is None else schedule.value(self.progress, prompt)

    def _learn_scored(self) -> None:
        """Lets schedules learn from the groups scored since the last call, in the order of draws, not of scoring."""
        scored, self._scored = self._scored, []
        for group in sorted(scored, key=lambda group: group.prompt.draw):
            for schedule in self.schedules.values():
                schedule.observe_group(group)

    @property
    def evaluated_step(self) -> int:
        """The step after which the last evaluation took place; -1: none yet."""
        return self._last_evaluation[0]

    def evaluation_due(self) -> messages.Evaluate | None:
        """Returns the evaluation due before the next step: full at step 0 and at the end, smaller every n steps."""
        every = self.settings.evaluate_every
        full = self.step == 0 or bool(self.ending)
        if not full and not (every and self.step % every == 0):
            return None
        step, was_full = self._last_evaluation
        done = step == self.step and (was_full or not full)
        return None if done or messages.Evaluate in self.awaiting else messages.Evaluate(self.step, full)

    def checkpoint_due(self) -> messages.SaveCheckpoint | None:
        """Returns the checkpoint due before the next step: every n steps and at any end of the run."""
        every = self.settings.checkpoint_every
        due = self.ending or self.stop_reason or (every and self.step and self.step % every == 0)
        return messages.SaveCheckpoint(self.step) if due and self._saved != self.step else None

    # --- events in, instructions out ------------------------------------------------------------

    def handle(self, event: messages.Event) -> list[messages.Instruction]:
        """Enters one event and returns the instructions to carry out now, in this order. A late or repeated response or
        reward changes no stage of a prompt. Raises `CoordinatorError` for an event that can't be true, and for a policy
        that contradicts the books or waits although no work is under way; `RunGivenUp` if no further step can be
        completed. Errors show the last lines of the log."""
        if self.finished:
            return []
        try:
            self._note(event)
            self._hear[type(event)](self, event)
            if self.served < 0:
                return []  # not started yet
            said: list[messages.Instruction] = []
            while not self.finished and (decided := self.policy.decide(self)):
                for instruction in decided:
                    self._note(instruction)
                    self._commit(instruction)
                said += decided
            if not (self.finished or self.awaiting or self.ledger.awaits_something):
                policy = type(self.policy).__name__
                raise CoordinatorError(f"after {type(event).__name__}, {policy} waits although nothing is under way")
        except CoordinatorError as error:
            error.before = [messages.message_line(*noted) for noted in self._log]
            raise
        return said

    def _commit(self, instruction: messages.Instruction) -> None:
        kind = type(instruction)
        self._say[kind](self, instruction)
        if kind in messages.ANSWERED:
            if kind in self.awaiting:
                raise CoordinatorError(f"{kind.__name__} was decided while another {kind.__name__} is under way")
            self.awaiting[kind] = instruction

    def _note(self, message: messages.Message) -> None:
        if type(message) is not messages.Tick:  # a tick needs no line: every line shows the time
            self._log.append((self.step + 1, self.now, message))

    _hear: Final = Handlers(messages.Event)
    _say: Final = Handlers(messages.Instruction)

    # --- events ---------------------------------------------------------------------------------

    @_hear.of(messages.Started)
    def _started(self, event: messages.Started) -> None:
        if self.served >= 0:
            raise CoordinatorError("Started came a second time")
        self.fleet.publish(event.version, range(len(self.fleet)))
        # A resumed trainer may have newer weights than freshly started engines: the policy then publishes first.
        self.version = event.version if self.version < 0 else self.version

    @_hear.of(messages.PromptsDrawn)
    def _prompts_drawn(self, event: messages.PromptsDrawn) -> None:
        count = self._answered(messages.DrawPrompts, event).count
        if len(event.prompts) > count:
            raise CoordinatorError(f"{len(event.prompts)} prompts were drawn, but only {count} were asked for")
        self.ledger.draw(event.prompts, event.skipped)
        # The data has ended if prompts and skips together are too few. They may be more: a source may replace skips.
        self.exhausted = len(event.prompts) + len(event.skipped) < count
        if self.ledger.skipped_in_a_row >= self.settings.max_skipped_in_a_row:
            raise RunGivenUp(
                f"{self.ledger.skipped_in_a_row} prompts in a row could not be prepared, the last one because: "
                f"{self.ledger.skipped[-1].reason}"
            )

    @_hear.of(messages.ResponseFinished)
    def _response_finished(self, event: messages.ResponseFinished) -> None:
        response = event.response
        entry = self.ledger.entries.get(response.draw)
        if not self.ledger.finish(response, max(self.version, self.fleet.newest)):
            return
        self.pace.end(response.rid, response.num_tokens, self.now)
        request, _, sample = response.rid.partition("/")
        ran = self.fleet.end_sample(request, int(sample))
        finished = response.finish != messages.ABORTED
        turn = entry is not None and entry.prompt.environment and response.finish == messages.STOPPED
        if ran and entry is not None and not turn:
            self.lengths.observe(entry.prompt, response.num_tokens, finished, response.sample)

    @_hear.of(messages.TurnObserved)
    def _observed(self, event: messages.TurnObserved) -> None:
        response = event.response
        if (entry := self.ledger.observe(response, event.done)) is not None:
            self.lengths.observe(entry.prompt, response.num_tokens, True, response.sample)

    @_hear.of(messages.EnvironmentFailed)
    def _environment_failed(self, event: messages.EnvironmentFailed) -> None:
        if self.ledger.environment_fails(event.rid, event.reason):
            request, _, _ = event.rid.partition("/")
            self.fleet.end(request)
            self.pace.lose(request)

    @_hear.of(messages.RewardReady)
    def _reward_ready(self, event: messages.RewardReady) -> None:
        if (scored := self.ledger.reward(event.rid, event.reward)) is not None and self.schedules:
            self._scored.append(scored.group())

    @_hear.of(messages.EngineFailed)
    def _engine_failed(self, event: messages.EngineFailed) -> None:
        self.ledger.fail(event.request_ids, event.reason)
        for request in event.request_ids:
            self.fleet.end(request)
            self.pace.lose(request)

    @_hear.of(messages.Trained)
    def _trained(self, event: messages.Trained) -> None:
        if event.version <= self.version:
            raise CoordinatorError(
                f"version {event.version} was trained, but a new version must be above {self.version}"
            )
        self.step = self._answered(messages.Train, event).step
        self.version, self.metrics = event.version, event.metrics
        for schedule in self.schedules.values():
            schedule.observe(event.metrics)
        self.pace.trained(self.now)
        if self.parallelism is not None:
            self.parallelism.next(int(event.metrics.get("rollout/preemptions", 0)))
        self.ledger.train_done()

    @_hear.of(messages.Accumulated)
    def _accumulated(self, event: messages.Accumulated) -> None:
        self.pace.trained(self.now)
        self._answered(messages.Accumulate, event)

    @_hear.of(messages.Lent, messages.CheckpointSaved)
    def _done(self, event: messages.Lent | messages.CheckpointSaved) -> None:
        self._answered(messages.ANSWERS[type(event)], event)

    @_hear.of(messages.Evaluated)
    def _evaluated(self, event: messages.Evaluated) -> None:
        order = self._answered(messages.Evaluate, event)
        if not event.given_up:
            self._last_evaluation = (order.step, order.full)

    @_hear.of(messages.ParallelismSet)
    def _parallelism_set(self, event: messages.ParallelismSet) -> None:
        self._answered(messages.SetParallelism, event)
        before = self.fleet
        self.fleet = EngineStates(event.engines, event.degree, event.kv_tokens or before.kv_tokens)
        self.fleet.publish(before.oldest, range(event.engines))

    @_hear.of(messages.WeightsPublished)
    def _weights_published(self, event: messages.WeightsPublished) -> None:
        order = self._answered(messages.PublishWeights, event)
        self.fleet.publish(event.version, order.engines or range(len(self.fleet)))

    @_hear.of(messages.StopRequested)
    def _stop_requested(self, event: messages.StopRequested) -> None:
        self.stop_reason = self.stop_reason or event.reason or "stopped"
        if event.failed:
            self.failure = self.failure or event.reason

    @_hear.of(messages.Tick)
    def _tick(self, event: messages.Tick) -> None:
        self.now = event.now

    def _answered(self, kind: type[I], event: messages.Event) -> I:
        """Returns the instruction that the event answers. Raises `CoordinatorError` if no such instruction is under
        way, or if a field that instruction and event share differs."""
        order = self.awaiting.pop(kind, None)
        if not isinstance(order, kind):
            raise CoordinatorError(
                f"{type(event).__name__} came, but no {kind.__name__} that it could answer is under way"
            )
        for name in vars(order).keys() & vars(event).keys():
            if (got := getattr(event, name)) != (wanted := getattr(order, name)):
                raise CoordinatorError(f"{name} {got} was reported done, but {name} {wanted} was asked for")
        return order

    # --- instructions ---------------------------------------------------------------------------

    @_say.of(messages.DrawPrompts, messages.PublishWeights, messages.Evaluate)
    def _nothing(self, order: messages.DrawPrompts | messages.PublishWeights | messages.Evaluate) -> None:
        """Does nothing: the books change with the answer to the instruction."""

    @_say.of(messages.Generate)
    def _generate(self, order: messages.Generate) -> None:
        for request in order.requests:
            self.ledger.generate(request, self.fleet.served[request.engine])
            self.fleet.begin(request, self.lengths.predict(request.prompt), self.work_of(request.prompt))
            self.pace.begin(request, self.now)

    @_say.of(messages.Act)
    def _act(self, order: messages.Act) -> None:
        self.ledger.act(order.response)

    @_say.of(messages.Continue)
    def _continue(self, order: messages.Continue) -> None:
        for turn in order.turns:
            self.ledger.next_turn(turn)
            self.fleet.begin_turn(turn, self.lengths.predict(turn.prompt, running=turn.response.num_tokens))
            self.pace.begin_turn(turn, self.now)

    @_say.of(messages.Park)
    def _park(self, order: messages.Park) -> None:
        self.ledger.park(order)
        if not order.keep:
            self.fleet.end(order.request)

    @_say.of(messages.Abort)
    def _abort(self, order: messages.Abort) -> None:
        self.ledger.surplus.pop(order.rid, None)

    @_say.of(messages.Score)
    def _score(self, order: messages.Score) -> None:
        self.ledger.score(order.response)

    @_say.of(messages.Skip)
    def _skip(self, order: messages.Skip) -> None:
        """Enters a skip. If too many groups teach nothing, stops the run, with a checkpoint of its training so far."""
        ledger = self.ledger
        ledger.skip(order.prompt, order.reason)
        kept = ledger.count(PromptStage.SCORED, PromptStage.TRAINING)
        complaint = self.settings.complaint(self.step + 1, kept, ledger.dropped, ledger.dropped_in_a_row)
        if complaint and not self.stop_reason:
            self.stop_reason = self.failure = complaint

    @_say.of(messages.Lend)
    def _lend(self, order: messages.Lend) -> None:
        left = set(range(len(self.fleet))) - self.fleet.lent - set(order.engines)
        busy = [entry.prompt.draw for entry in self.ledger.at(PromptStage.RUNNING) if entry.engine in order.engines]
        if not order.engines or not left or busy:
            raise CoordinatorError(
                f"engines {order.engines} can't be lent: draws {busy} run on them, and {len(left)} engines would be "
                "left"
            )
        self.fleet.lent.update(order.engines)

    def _check_step(self, order: messages.Accumulate | messages.Train) -> None:
        if order.step != self.step + 1:
            raise CoordinatorError(f"{type(order).__name__} of step {order.step}; step {self.step + 1} is under way")

    @_say.of(messages.Accumulate)
    def _accumulate(self, order: messages.Accumulate) -> None:
        self._check_step(order)
        if not order.groups or not self.fleet.lent.issuperset(order.engines):
            raise CoordinatorError(
                f"{len(order.groups)} groups can't be trained on engines {order.engines}: groups are needed, and all "
                "of these engines must be lent"
            )
        self.ledger.train(order.groups)
        self.pace.train(() if order.engines else order.groups, self.now)

    @_say.of(messages.Train)
    def _train(self, order: messages.Train) -> None:
        ledger = self.ledger
        self._check_step(order)
        if messages.Accumulate in self.awaiting:
            raise CoordinatorError("Train was decided before the gradients of an earlier Accumulate were there")
        ledger.train(order.groups)
        self._dropped += ledger.dropped.total()
        ledger.dropped.clear()
        if not ledger.count(PromptStage.TRAINING):
            raise CoordinatorError(f"step {order.step} has nothing to train on")
        self.pace.train(order.groups, self.now)

    @_say.of(messages.SetParallelism)
    def _set_parallelism(self, order: messages.SetParallelism) -> None:
        if self.awaiting or self.ledger.count(PromptStage.RUNNING, PromptStage.STOPPING):
            raise CoordinatorError(f"{order} was decided while requests or instructions are under way")

    @_say.of(messages.SaveCheckpoint)
    def _save_checkpoint(self, order: messages.SaveCheckpoint) -> None:
        # Set now, not after saving: the checkpoint itself must record that this step has a checkpoint.
        self._saved = order.step

    @_say.of(messages.Finish)
    def _finish(self, order: messages.Finish) -> None:
        if self.ledger.count(PromptStage.RUNNING, PromptStage.STOPPING) or self.awaiting:
            raise CoordinatorError(
                f"Finish was decided with {self.ledger.live} prompts and {len(self.awaiting)} instructions under way"
            )
        if self.failure:
            raise RunGivenUp(self.failure)
        self.finished = order

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Returns all state that decides the rest of the run. Raises `CoordinatorError` during a `Train`."""
        if messages.Train in self.awaiting:
            raise CoordinatorError(f"step {self.step + 1} is being trained: state can be taken only between steps")
        self._learn_scored()
        return {
            "step": self.step,
            "version": self.version,
            "evaluated": list(self._last_evaluation),
            "saved": self._saved,
            # A failed run is resumed with counts from zero: the user may have mended the reward.
            "ledger": ledger_state(self.ledger) | ({"dropped": NOTHING_DROPPED} if self.failure else {}),
            "lengths": self.lengths.state_dict(),
            "schedules": {name: schedule.state_dict() for name, schedule in self.schedules.items()},
            "parallelism": self.parallelism.state_dict() if self.parallelism is not None else {},
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: SavedState, prompts: Mapping[int, Prompt] | None = None) -> None:
        """Continues from `state`. Call it before `Started`. The settings may differ from the settings of the run that
        saved `state`. `prompts` has the prompts of `state["ledger"]["entries"]`, by draw."""
        if self.served >= 0:
            raise CoordinatorError("state can only be loaded before the start")
        self.step = state["step"]
        self.version = state["version"]
        step, full = state["evaluated"]
        self._last_evaluation = (step, full)
        self._saved = state["saved"]
        load_ledger_state(self.ledger, state["ledger"], prompts or {})
        self.lengths.load_state_dict(state["lengths"])
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(state.get("schedules", {}).get(name, {}))
        if self.parallelism is not None and state.get("parallelism"):
            self.parallelism.load_state_dict(state["parallelism"])
        self.policy.load_state_dict(state["policy"])
