"""Generation runs ahead of training, as far as measured staleness allows (Flux, component 1).

One number, the async ratio, decides how many prompts are submitted. Prompts are submitted as long as

    submitted <= (step + 1 + ratio * max_staleness) * prompts_per_step

(AReaL's bound on capacity, arXiv:2505.24298, section 5.1, with ratio * max_staleness for its eta). At ratio 0 the
instructions are those of the synchronous policy. After each step a PID controller moves the ratio so that the staleness
of the trained data stays at its target. A barrier follows if staleness is more than `TOLERANCE` above the target, or
after more than `SYNC_INTERVAL` steps without a barrier. At a barrier, no prompt is drawn until no response runs and no
training step is under way.

No token that is more than `max_staleness` versions old is trained on, and no group becomes too old while it waits for
its step: of the groups that have `k` steps left, no more than `k - 1` steps' worth may miss the next step (`due`).
Training waits for unfinished groups that would otherwise become too old. A group that is too old nevertheless, for
example because a run was resumed with a lower `max_staleness`, is generated again, and counted (`too_old`).

If there are more groups than a step needs, `compose` chooses among the groups (Flux, component 4), as a pure function.
Candidates are in draw order or, with `stalest`, stalest first. With `curriculum`, the order is random at the start of
the run; at the end of the run, easy groups come first. Then candidates are taken from each stratum in proportion to its
size (`stratify`: strata by staleness; `diversity`: by source and kinds of media). With `lengths`, each stratum gives
groups about as long as the first candidate. Groups that are due are taken before all others.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import numpy as np

from ...base.types import Group, SavedState, State
from ...config import AdaptiveAsyncConfig
from ...config.schedules import GAINS, Pid
from ..ledger import Entry, PromptStage
from ..machine import Coordinator
from ..messages import DrawPrompts, Evaluate, Instruction, PublishWeights, SaveCheckpoint, Train
from .rounds import Base, generate

# Flux's constants.
RATIOS = 0.1, 0.9  # bounds of the ratio; an initial ratio outside extends them, but an initial 0 or 1 stays
EMA = 0.9  # weight of the previous estimate of staleness in the next estimate
TOLERANCE = 0.05  # a barrier is forced if staleness exceeds the target by more than this
SYNC_INTERVAL = 10  # a barrier is forced after more steps than this without a barrier
KL_WEIGHT, VARIANCE_WEIGHT, GAP_WEIGHT = 0.4, 0.3, 0.3
KL_NORMALIZER = 0.1  # nats that count as staleness 1
VARIANCE_NORMALIZER = 2.0  # log1p of the variance of importance weights that counts as staleness 1

_CHOICE = 2  # with `lengths`: candidates that are compared for each candidate that is taken


@dataclasses.dataclass(eq=False)
class AdaptiveAsync(Base):
    """The policy of the module's docstring. Displays read `ratio`, `staleness` and `barriers`; `seed` is for
    `compose`."""

    settings: AdaptiveAsyncConfig = dataclasses.field(default_factory=AdaptiveAsyncConfig)
    seed: int = 0
    sync_interval: int = SYNC_INTERVAL
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        ratio = self.settings.ratio
        low, high = (ratio, ratio) if ratio in (0.0, 1.0) else (min(ratio, RATIOS[0]), max(ratio, RATIOS[1]))
        self._pid = Pid(ratio, low, high, kp=GAINS["kp"], ki=GAINS["ki"], kd=GAINS["kd"])
        self.staleness = 0.0  # moving average
        self.barriers = 0  # barriers forced so far
        self.barrier = False  # True: no prompt is drawn until nothing is under way
        self.since_sync = 0  # steps since the last barrier
        self.too_old = 0  # groups that were generated and scored, and became too old
        self.seen = -1  # the step whose metrics were observed last

    @property
    def ratio(self) -> float:
        return self._pid.now

    def decide(self, coordinator: Coordinator) -> Sequence[Instruction]:
        if urgent := self._urgent(coordinator):
            return urgent
        if coordinator.step != self.seen:
            self._observe(coordinator)
        if publish := self._publish(coordinator):
            return publish
        if boundary := self._boundary(coordinator):
            return boundary
        if coordinator.ending or coordinator.stop_reason or (coordinator.awaiting and not self.ratio):
            return []
        return self._next_step(coordinator) or self._ahead(coordinator)

    # --- after a step ---------------------------------------------------------------------------

    def _observe(self, coordinator: Coordinator) -> None:
        """Updates the ratio as Flux does, and forces a barrier that is due, once after each step."""
        first, self.seen = self.seen < 0, coordinator.step
        if first:
            return
        now = staleness(coordinator.metrics, self.settings.max_staleness)
        self.staleness = EMA * self.staleness + (1 - EMA) * now
        target = float(coordinator.scheduled("target_staleness", self.settings.target_staleness))
        self._pid.update(target - self.staleness)
        self.since_sync += 1
        too_stale = self.staleness > target + self.tolerance
        if not self.barrier and (too_stale or self.since_sync > self.sync_interval):
            self.barrier = True
            self.barriers += 1

    def _publish(self, coordinator: Coordinator) -> Sequence[Instruction]:
        """Publishes new weights at once: to all engines with `interrupt`, else to idle engines only."""
        if PublishWeights in coordinator.awaiting or coordinator.served == coordinator.version:
            return []
        if self.settings.interrupt:
            return [PublishWeights(coordinator.version)]
        fleet, newest = coordinator.fleet, coordinator.version
        # Responses between two turns run on no engine, but go on where they were.
        busy = {entry.engine for entry in coordinator.ledger.at(PromptStage.RUNNING)}
        stale = (engine for engine, served in enumerate(fleet.served) if served != newest)
        idle = tuple(engine for engine in stale if not fleet.running[engine] and engine not in busy)
        return [PublishWeights(coordinator.version, idle)] if idle else []

    def _boundary(self, coordinator: Coordinator) -> Sequence[Instruction]:
        """Returns the evaluation, checkpoint or end that is due after a step. Engines run on, but at the end and at a
        stop all running responses are parked first."""
        ledger, awaiting = coordinator.ledger, coordinator.awaiting
        if awaiting.keys() & {Train, Evaluate, SaveCheckpoint, PublishWeights, DrawPrompts}:
            return []
        last = coordinator.ending or coordinator.stop_reason
        if last and (running := ledger.at(PromptStage.RUNNING)):
            return [entry.park(keep=True) for entry in running]
        if coordinator.served != coordinator.version or (last and ledger.count(PromptStage.STOPPING)):
            return []
        return self._due(coordinator)

    # --- the next step --------------------------------------------------------------------------

    def _next_step(self, coordinator: Coordinator) -> Sequence[Instruction]:
        ledger, needed = coordinator.ledger, coordinator.settings.prompts_per_step
        scored = ledger.count(PromptStage.SCORED)
        if not scored or coordinator.awaiting.keys() & {Train, Evaluate, SaveCheckpoint}:
            return []
        if scored < needed and not (coordinator.exhausted and scored == ledger.live):
            return []
        # evaluations and checkpoints come first, once the new weights are published
        if coordinator.evaluation_due() or coordinator.checkpoint_due():
            return []
        limit, version = self.settings.max_staleness, coordinator.version
        candidates = [entry.group() for entry in ledger.at(PromptStage.SCORED)]
        ages = [versions_behind(group, version) for group in candidates]
        if late := [group for group, age in zip(candidates, ages, strict=True) if age > limit]:
            self.too_old += len(late)
            return [ledger.entries[group.prompt.draw].park() for group in late]
        to_come = [version - entry.born for entry in ledger.at(*_UNDER_WAY)]
        if due(to_come, limit, needed):
            return []
        chosen = compose(
            candidates,
            min(needed, len(candidates)),
            self.settings.prefer,
            version=version,
            urgent=due([*ages, *to_come], limit, needed),
            progress=coordinator.step / coordinator.settings.steps,
            seed=self.seed,
            step=coordinator.step,
        )
        return [Train(coordinator.step + 1, chosen)]

    # --- running ahead --------------------------------------------------------------------------

    def _ahead(self, coordinator: Coordinator) -> Sequence[Instruction]:
        ledger = coordinator.ledger
        if self.barrier and not coordinator.awaiting and not ledger.count(*_UNDER_WAY):
            self.barrier, self.since_sync = False, 0
        waiting = ledger.count(PromptStage.DEFERRED, PromptStage.WAITING)
        room = 0 if self.barrier or coordinator.exhausted else self._room(coordinator)
        if (room <= 0 and not waiting) or DrawPrompts in coordinator.awaiting:
            return []
        engines = self._usable(coordinator)
        if not engines:
            return []
        if room > 0:
            return [DrawPrompts(room)]
        oldest, size = coordinator.version - self.settings.max_staleness, coordinator.settings.group_size
        entries = ledger.at(PromptStage.DEFERRED, PromptStage.WAITING)
        if not self._in_time(coordinator, entries, min(coordinator.fleet.served[engine] for engine in engines)):
            engines = self._newest(coordinator)
        if not engines:
            return []
        return generate(coordinator, entries, size, size, keep=lambda entry: entry.born > oldest, engines=engines)

    def _usable(self, coordinator: Coordinator) -> list[int]:
        """Returns the engines that get new requests: with `interrupt` and a ratio above 0 all engines, else the engines
        that serve the newest weights."""
        if self.ratio and self.settings.interrupt:
            return list(range(len(coordinator.fleet)))
        return self._newest(coordinator)

    def _newest(self, coordinator: Coordinator) -> list[int]:
        return [engine for engine, served in enumerate(coordinator.fleet.served) if served == coordinator.version]

    def _in_time(self, coordinator: Coordinator, entries: Sequence[Entry], served: int) -> bool:
        """Says whether all groups can be trained on in time if `entries` begin under the weights `served`."""
        ledger, size, limit = coordinator.ledger, coordinator.settings.prompts_per_step, self.settings.max_staleness
        version = coordinator.version + (Train in coordinator.awaiting)  # of the step that these groups may be in
        ages = [version - served] * len(entries) + [version - entry.born for entry in ledger.at(*_UNDER_WAY)]
        ages += [versions_behind(entry.group(), version) for entry in ledger.at(PromptStage.SCORED)]
        return version - served <= limit and due(ages, limit, size) <= size

    def _room(self, coordinator: Coordinator) -> int:
        """Returns the number of prompts that may be submitted now."""
        settings = coordinator.settings
        steps = min(1 + self.ratio * self.settings.max_staleness, settings.steps - coordinator.step)
        return math.floor(steps * settings.prompts_per_step) - coordinator.ledger.live

    def metrics(self) -> dict[str, float]:
        names = {"barriers": self.barriers, "too_old": self.too_old, "steps_since_barrier": self.since_sync}
        return {"async_ratio": self.ratio, "staleness": self.staleness} | names

    def state_dict(self) -> State:
        return {"pid": self._pid.state_dict()} | {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: SavedState) -> None:
        """Restores the ratio and the barriers. Ignores the state of another policy."""
        if "pid" not in state:
            return
        self._pid.load_state_dict(state["pid"])
        for name in _SAVED:
            setattr(self, name, state.get(name, 0))


def staleness(metrics: Mapping[str, float], max_staleness: int) -> float:
    """Returns the distance between the policy and the policy that generated its data, in [0, 1] (Flux, component 1).

    The distance is the weighted sum of three metrics of a step, each divided by the value that counts as 1:
    KL(behaviour || policy) in nats, `staleness/kl`; `log1p` of the variance of importance weights,
    `staleness/variance`; the mean number of versions between generation and training, `staleness/lag_mean`. A step
    without these metrics (a batch that no engine generated) has staleness 0.
    """
    kl = metrics.get("staleness/kl", 0.0) / KL_NORMALIZER
    variance = math.log1p(max(metrics.get("staleness/variance", 0.0), 0.0)) / VARIANCE_NORMALIZER
    gap = metrics.get("staleness/lag_mean", 0.0) / max(max_staleness, 1)
    total = KL_WEIGHT * kl + VARIANCE_WEIGHT * variance + GAP_WEIGHT * gap
    return min(max(total, 0.0), 1.0) if math.isfinite(total) else 1.0


_SAVED = ("staleness", "barriers", "barrier", "since_sync", "seen", "too_old")
_UNDER_WAY = (PromptStage.RUNNING, PromptStage.STOPPING, PromptStage.COMPLETE, PromptStage.LOST)


# --- the groups of a step ---------------------------------------------------------------------------


def versions_behind(group: Group, version: int) -> int:
    """Counts the versions between the trainer's weights and the oldest weights that generated a token of the group."""
    responses = (sample.response for sample in group.samples)
    return version - min((r.version_span[0] for r in responses if r.num_trained), default=version)


def due(ages: Iterable[int], max_staleness: int, size: int) -> int:
    """Returns how many groups the next step must train on, so that no group becomes too old while later steps of `size`
    groups train on the others. `ages` are the versions by which the groups are behind, at most `max_staleness`."""
    left = Counter(max_staleness - age for age in ages)  # by the number of steps that a group may miss
    most = sum(left.values()) // size + 1
    return max(sum(left[k] for k in left if k <= missed) - missed * size for missed in range(most + 1))


def total_tokens(group: Group) -> int:
    """Counts the tokens of all responses, those of environments included."""
    return sum(sample.response.num_tokens for sample in group.samples)


def difficulty(group: Group) -> float:
    """Returns the share of the responses that are not correct, in [0, 1]."""
    return 1 - sum(sample.reward.correct for sample in group.samples) / max(len(group.samples), 1)


def compose(
    groups: Sequence[Group],
    count: int,
    prefer: Collection[str] = (),
    *,
    version: int,
    urgent: int,
    progress: float,
    seed: int,
    step: int,
) -> tuple[Group, ...]:
    """Returns the chosen `count` of `groups`, in draw order.

    The `urgent` oldest groups are taken first. `prefer` names options of the module's docstring. Without options, the
    remaining groups are taken in draw order.

    `version` is the version of the trainer's weights, `progress` the share of the run's steps that are done.
    """
    ordered = sorted(groups, key=lambda group: group.prompt.draw)
    ages = [versions_behind(group, version) for group in ordered]
    everyone = range(len(ordered))
    oldest = sorted(everyone, key=lambda i: (-ages[i], i))[: min(urgent, count)]
    rng = np.random.default_rng([seed, step])
    ranking = list(everyone)
    if "stalest" in prefer:
        ranking.sort(key=lambda i: -ages[i])
    if "curriculum" in prefer:  # by chance as the run begins, by difficulty at its end, a mixture of both in between
        by_difficulty = sorted(ranking, key=lambda i: difficulty(ordered[i]))
        chance = 1 - min(max(progress, 0.0), 1.0)
        places = (1 - chance) * np.arange(len(ranking)) + chance * len(ranking) * rng.random(len(ranking))
        ranking = [by_difficulty[k] for k in np.argsort(places, kind="stable")]
    by_age, by_kind = "stratify" in prefer, "diversity" in prefer
    kinds = [(g.prompt.source, frozenset(media.kind for media in g.prompt.media)) for g in ordered]
    strata = [(age * by_age, kind if by_kind else None) for age, kind in zip(ages, kinds, strict=True)]
    lengths = [math.log1p(total_tokens(group)) for group in ordered] if "lengths" in prefer else None
    chosen = _choose(ranking, oldest, count, strata, lengths, rng)
    return tuple(ordered[i] for i in sorted(chosen))


def _choose(
    ranking: Sequence[int],
    urgent: Sequence[int],
    count: int,
    strata: Sequence[Hashable],
    lengths: Sequence[float] | None,
    rng: np.random.Generator,
) -> set[int]:
    chosen = set(urgent)
    if len(chosen) == count:
        return chosen
    quotas = _quotas(Counter(strata), Counter(strata[i] for i in urgent), count, rng)
    rest = [i for i in ranking if i not in chosen]
    anchor = lengths[rest[0]] if lengths else 0.0
    for stratum, quota in quotas.items():
        members = [i for i in rest if strata[i] == stratum]
        wanted = quota - sum(strata[i] == stratum for i in urgent)
        if lengths:
            # The first candidate of `rest` has distance 0, so its stratum takes it first.
            members = sorted(members[: _CHOICE * wanted], key=lambda i: abs(lengths[i] - anchor))
        chosen.update(members[:wanted])
    return chosen


def _quotas(
    sizes: Mapping[Hashable, int], least: Mapping[Hashable, int], count: int, rng: np.random.Generator
) -> dict[Hashable, int]:
    """Returns the number of groups to take from each stratum: proportional to its size and at least `least`, by largest
    remainders; chance breaks ties."""
    quotas: dict[Hashable, int] = {}
    open_, left, total = dict(sizes), count, sum(sizes.values())
    while over := [key for key, size in open_.items() if least.get(key, 0) * total > size * left]:
        for key in over:
            quotas[key] = least[key]
            del open_[key]
        left, total = count - sum(quotas.values()), sum(open_.values())
    lucky = dict(zip(open_, rng.permutation(len(open_)).tolist(), strict=True))
    quotas |= {key: size * left // total for key, size in open_.items()}
    by_remainder = sorted(open_, key=lambda key: (-(open_[key] * left % total), lucky[key]))
    for key in by_remainder[: count - sum(quotas.values())]:
        quotas[key] += 1
    return quotas
