"""A cluster in virtual time, which carries out the real coordinator's instructions as `fluxjax.runtime` does.

All work is an action of the clock: decoding, rewards, training, weight sync, late replies. The coordinator gets events
one after the other, and its instructions are begun in their order. Training has its own GPUs (`train_gpus`), or takes
the engines' GPUs while the engines pause.
"""

import dataclasses
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from ..base.timeline import Span, Timeline
from ..base.types import ENVIRONMENT, Group
from ..coordinator import Coordinator, messages
from ..coordinator.messages import Handlers
from .clock import Clock
from .faults import FaultPlan, exponential, uniform
from .options import SimulateConfig
from .reward_stage import Scoring
from .simulated_rollout import SHOWN, Rollout, meet_incidents
from .workload import Workload, longer

PATIENCE = 1e5  # seconds without an event after which a run is stuck: only faults keep the clock going
STEPS_SHOWN = 6  # in the Gantt picture
_ANSWER, _ANSWER_FAILS = range(100, 102)  # names of random numbers
Watch = Callable[[float, messages.Event | messages.Instruction], None]  # takes the time and the message


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step of a run, from the end of the last step's training to that of its own. Seconds are virtual."""

    step: int
    round: str  # short or long; empty for policies without such rounds
    end: float
    seconds: float
    rollout: float  # seconds of the step with a request on an engine
    train: float
    longest: int  # tokens of the longest response that ended
    trained_tokens: int  # tokens of responses
    lag_mean: float  # mean over the trained tokens, in versions
    lag_max: int


class StuckError(RuntimeError):
    """The coordinator waits for an event that will never happen."""


class Cluster:
    """One run: `Cluster(config, coordinator).run()`. `records` has a record for every step."""

    def __init__(self, config: SimulateConfig, coordinator: Coordinator, watch: Watch | None = None) -> None:
        self.config, self.coordinator, self.watch = config, coordinator, watch
        self.settings = settings = config.simulation
        self.clock = Clock()
        self.timeline = Timeline(STEPS_SHOWN, lambda: self.clock.now)
        self.work = Workload(config.seed, settings, config.rollout.max_new_tokens)
        self.faults = FaultPlan(settings.faults, config.seed)
        self.rollout = Rollout(self.clock, settings, self.work, self.faults, self.post, self.timeline)
        self.scoring = Scoring(self.clock, settings, self.faults, self.post, self.timeline)
        self.records: list[StepRecord] = []
        self.events = 0
        self.train_gpu_seconds = 0.0
        self._drawn = 0
        self._round = ""
        self._rollout_seconds, self._preemptions = 0.0, 0  # totals at the end of the last step
        self._train_seconds, self._trained_tokens = 0.0, 0  # sums of the step under way
        self._lags: Counter[int] = Counter()
        self._inbox: deque[messages.Event] = deque()
        self._busy = False
        self._heard = 0.0  # the time of the last event

    def run(self) -> messages.Finish:
        """Runs until the coordinator is finished. Raises its errors, and StuckError if it waits for ever."""
        self.clock.at(0.0, partial(self.post, messages.Started(0)))
        meet_incidents(self.rollout, self.faults, over=lambda: self.clock.now - self._heard > PATIENCE)
        self.clock.run()
        if self.coordinator.finished is None:
            awaited = ", ".join(kind.__name__ for kind in self.coordinator.awaiting) or "responses or rewards"
            step, heard = self.coordinator.step + 1, self._heard
            raise StuckError(
                f"step {step}: nothing has happened since time {heard:.0f} s, and the coordinator awaits {awaited}"
            )
        return self.coordinator.finished

    def post(self, event: messages.Event) -> None:
        """Hands the coordinator an event, now. Speculative sync learns from the event's time."""
        if self.config.speculative_sync:
            self._inbox.append(messages.Tick(self.clock.now))
        self._inbox.append(event)
        if self._busy:
            return
        self._busy, self._heard = True, self.clock.now
        while self._inbox and self.coordinator.finished is None:
            event = self._inbox.popleft()
            self.events += 1
            if self.watch:
                self.watch(self.clock.now, event)
            for instruction in self.coordinator.handle(event):
                if self.watch:
                    self.watch(self.clock.now, instruction)
                self._carry_out[type(instruction)](self, instruction)
            if self.rollout.idle:
                self.scoring.rollout_over()
        self._busy = False

    # --- instructions -------------------------------------------------------------------------------

    _carry_out: Final = Handlers(messages.Instruction)

    @_carry_out.of(messages.DrawPrompts)
    def _draw(self, order: messages.DrawPrompts) -> None:
        settings = self.settings
        last = settings.epochs * settings.prompts or sys.maxsize
        draws = range(self._drawn, min(self._drawn + order.count, last))
        self._drawn = draws.stop
        self.post(messages.PromptsDrawn(tuple(self.work.prompt(draw) for draw in draws)))

    @_carry_out.of(messages.Generate)
    def _generate(self, order: messages.Generate) -> None:
        self._round = getattr(self.coordinator.policy, "round", "")
        self.rollout.generate(order, self.coordinator.step + 1)

    @_carry_out.of(messages.Continue)
    def _continue(self, order: messages.Continue) -> None:
        for turn in order.turns:
            self.rollout.continue_turn(turn)

    @_carry_out.of(messages.Act)
    def _act(self, order: messages.Act) -> None:
        """Answers the last turn of a response after some seconds, if its environment does not fail. The last turn of a
        sample ends the episode, without an observation."""
        response, settings = order.response, self.settings
        attempt = int(response.rid.partition("/")[0].partition(".")[2])
        names = self.config.seed, response.draw, attempt, response.sample, response.num_tokens
        done = response.num_tokens >= self.rollout.newest[response.draw].samples.lengths[response.sample]
        event: messages.Event = messages.TurnObserved(response, done)
        if uniform(_ANSWER_FAILS, *names) < settings.faults.environment_fails:
            event = messages.EnvironmentFailed(response.rid, "its environment does not answer")
        elif not done:
            event = messages.TurnObserved(longer(response, ENVIRONMENT, settings.observation_tokens), done)
        self.clock.after(exponential(settings.environment_seconds, _ANSWER, *names), partial(self.post, event))

    @_carry_out.of(messages.Park)
    def _park(self, order: messages.Park) -> None:
        self.rollout.abort(order.request)

    @_carry_out.of(messages.Abort)
    def _abort(self, order: messages.Abort) -> None:
        self.rollout.abort(order.rid)

    @_carry_out.of(messages.Skip)
    def _skip(self, order: messages.Skip) -> None:
        self.rollout.forget(order.prompt.draw)

    @_carry_out.of(messages.Score)
    def _score(self, order: messages.Score) -> None:
        response, rollout = order.response, self.rollout
        tokens = self.work.prompt_tokens(response.draw) + response.num_tokens
        generation = rollout.newest[response.draw]
        self.scoring.score(generation.request, response, generation.samples, tokens, self.coordinator.step + 1)

    @_carry_out.of(messages.Lend)
    def _lend(self, order: messages.Lend) -> None:
        """Lends the engines immediately, since their requests were parked before."""
        self.rollout.lend(set(order.engines))
        self.clock.after(0.0, partial(self.post, messages.Lent(order.engines)))

    @_carry_out.of(messages.Accumulate)
    def _accumulate(self, order: messages.Accumulate) -> None:
        gpus = len(order.engines) * self.rollout.degree
        lanes = [f"engine {index}" for index in order.engines if index < SHOWN] or ["trainer"]
        then = partial(self.post, messages.Accumulated(order.step))
        self._compute(order.step, order.groups, gpus, lanes, False, then)

    @_carry_out.of(messages.Train)
    def _train(self, order: messages.Train) -> None:
        self._compute(order.step, order.groups, 0, ["trainer"], True, partial(self._trained, order.step))

    def _compute(
        self, step: int, groups: Sequence[Group], gpus: int, lanes: list[str], update: bool, then: Callable[[], None]
    ) -> None:
        """Computes gradients on `gpus` GPUs of lent engines. If `gpus` is 0, computes them on training's own GPUs; if
        training has none, on all GPUs, while all engines sleep."""
        work, now = self.work, self.clock.now
        responses = sum(sample.response.num_tokens for group in groups for sample in group.samples)
        prompts = sum(work.prompt_tokens(group.prompt.draw) * len(group.samples) for group in groups)
        self._trained_tokens += responses
        self._lags += _lags(groups, self.coordinator.version)
        for group in groups:
            self.rollout.forget(group.prompt.draw)
        taken: set[int] = set()
        if not gpus and not self.settings.train_gpus:
            taken = self.rollout.sleep(set(range(len(self.rollout.engines))))
        gpus = gpus or self.settings.train_gpus or self.settings.gpus
        seconds = self.rollout.hardware.train_seconds(responses + prompts, gpus, update)
        self._train_seconds += seconds
        self.train_gpu_seconds += seconds * gpus
        for lane in lanes:
            self.timeline.add(Span("train", lane, now, now + seconds, step))
        self.clock.after(seconds, partial(self._computed, taken, then))

    def _computed(self, taken: set[int], then: Callable[[], None]) -> None:
        self.rollout.wake(taken)
        then()

    def _trained(self, step: int) -> None:
        now, rollout, last = self.clock.now, self.rollout, self.records[-1].end if self.records else 0.0
        metrics = _staleness_metrics(self._lags, self.settings.drift)
        preemptions = rollout.preemptions
        metrics["rollout/preemptions"] = float(preemptions - self._preemptions)
        self.records.append(
            StepRecord(
                step=step,
                round=self._round,
                end=now,
                seconds=now - last,
                rollout=rollout.seconds - self._rollout_seconds,
                train=self._train_seconds,
                longest=rollout.longest,
                trained_tokens=self._trained_tokens,
                lag_mean=metrics["staleness/lag_mean"],
                lag_max=int(metrics["staleness/lag_max"]),
            )
        )
        self._rollout_seconds, self._preemptions = rollout.seconds, preemptions
        self._train_seconds, self._trained_tokens = 0.0, 0
        rollout.longest = 0
        self._lags.clear()
        self.post(messages.Trained(self.coordinator.version + 1, metrics))

    @_carry_out.of(messages.PublishWeights)
    def _publish(self, order: messages.PublishWeights) -> None:
        self.rollout.publish(order, partial(self._published, order.version, self.clock.now))

    def _published(self, version: int, began: float) -> None:
        self.timeline.add(Span("sync", "trainer", began, self.clock.now, max(self.coordinator.step, 1)))
        self.post(messages.WeightsPublished(version))

    @_carry_out.of(messages.SetParallelism)
    def _set_parallelism(self, order: messages.SetParallelism) -> None:
        self.rollout.set_parallelism(order.degree)
        changed = messages.ParallelismSet(order.degree, len(self.rollout.engines))
        self._later("sync", self.rollout.hardware.sync_seconds(), self.coordinator.step, changed)

    @_carry_out.of(messages.Evaluate)
    def _evaluate(self, order: messages.Evaluate) -> None:
        self._later("eval", self.settings.evaluation_seconds, order.step, messages.Evaluated(order.step))

    @_carry_out.of(messages.SaveCheckpoint)
    def _save(self, order: messages.SaveCheckpoint) -> None:
        self._later("checkpoint", self.settings.checkpoint_seconds, order.step, messages.CheckpointSaved(order.step))

    @_carry_out.of(messages.Finish)
    def _finish(self, order: messages.Finish) -> None:
        self.clock.stop()

    def _later(self, name: str, seconds: float, step: int, event: messages.Event) -> None:
        if seconds:
            now = self.clock.now
            self.timeline.add(Span(name, "trainer", now, now + seconds, max(step, 1)))
        self.clock.after(seconds, partial(self.post, event))

    # --- totals -------------------------------------------------------------------------------------

    def utilisation(self) -> dict[str, float]:
        """Returns shares of the time of all GPUs so far, or of the rollout's GPUs for `rollout_busy`. `busy` is the
        share in which the engine or the trainer on a GPU works. For `throughput`, an engine counts by its decoded
        tokens, as a share of the tokens that it would have decoded at its peak."""
        gpus, span = self.settings.gpus, max(self.clock.now, math.ulp(1.0))
        worked, decoded = self.rollout.utilisation()
        engines, trainer = self.settings.rollout_gpus / gpus, self.train_gpu_seconds / (gpus * span)
        return {
            "busy": engines * worked + trainer,
            "throughput": engines * decoded + trainer,
            "rollout_busy": worked,
            "training": trainer,
        }


def _lags(groups: Iterable[Group], version: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for sample in (sample for group in groups for sample in group.samples):
        versions, trained = sample.response.versions, sample.response.num_trained
        if trained and versions[0] == versions[-1]:  # versions only grow within a response
            counts[version - versions[0]] += trained
        else:
            for token_version, count in Counter(versions).items():
                if token_version != ENVIRONMENT:
                    counts[version - token_version] += count
    return counts


def _staleness_metrics(counts: Counter[int], drift: float) -> dict[str, float]:
    """Computes a trainer's metrics by a law of the simulation: each update moves a token's log-probability by a normal
    variable of standard deviation `drift`, independently. Log-ratios over a lag of k versions then are normal with
    variance v = k drift^2 and mean -v/2: KL(behaviour || policy) is v/2, ratios have mean 1 and variance exp(v) - 1."""
    total = max(sum(counts.values()), 1)

    def mean(of: Callable[[int], float]) -> float:
        return sum(count * of(lag) for lag, count in sorted(counts.items())) / total

    return {
        "staleness/lag_mean": mean(lambda lag: lag),
        "staleness/lag_max": float(max(counts, default=0)),
        "staleness/kl": mean(lambda lag: lag * drift**2 / 2),
        "staleness/variance": mean(lambda lag: math.expm1(min(lag * drift**2, 50.0))),
    }
