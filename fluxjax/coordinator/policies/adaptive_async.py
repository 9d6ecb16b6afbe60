"""Generation runs ahead of training, as far as measured staleness allows (Flux, component 1).

One number, the async ratio, says how far: prompts are submitted as long as

    submitted <= (step + 1 + ratio * max_staleness) * prompts_per_step

(AReaL's bound on capacity, arXiv:2505.24298, section 5.1, with ratio * max_staleness for its eta). At 0 this is the
synchronous policy, instruction for instruction. After each step a PID controller moves the ratio so that the staleness
of the trained data stays at its target. If staleness is far above the target, or `SYNC_INTERVAL` steps have passed
without a barrier, a barrier lets all running responses end and be trained on before new prompts begin.

No token that is more than `max_staleness` versions old is trained on. Training waits for a group that would become too
old by missing the step; a prompt that still became too old is generated again.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ...config import AdaptiveAsyncConfig
from ...config.schedules import Pid
from ..ledger import PromptStage
from ..machine import Coordinator
from ..messages import DrawPrompts, Evaluate, Instruction, PublishWeights, SaveCheckpoint, Train
from ..saved import SavedState, State
from ..selection import compose, versions_behind
from .rounds import Base, generate

# Flux's constants.
GAINS = {"kp": 0.1, "ki": 0.01, "kd": 0.05}  # of the controller of the ratio
RATIOS = 0.1, 0.9  # between which the controller moves the ratio
EMA = 0.9  # of the previous estimate of staleness, in the next one
TOLERANCE = 0.05  # engines are synchronised before anything new begins if staleness exceeds the target by more
SYNC_INTERVAL = 10  # steps between two forced barriers at most
KL_WEIGHT, VARIANCE_WEIGHT, GAP_WEIGHT = 0.4, 0.3, 0.3
KL_NORMALIZER = 0.1  # nats that count as staleness 1
VARIANCE_NORMALIZER = 2.0  # log1p of the variance of importance weights that counts as 1


@dataclasses.dataclass(eq=False)
class AdaptiveAsync(Base):
    """The policy of the module's docstring. `ratio`, `staleness` and `barriers` are for displays; `seed` is for
    `selection.compose`."""

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
        self.barrier = False  # nothing new begins until all running responses are trained on
        self.since_sync = 0  # steps
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
        """Updates the ratio as Flux does, once after each step."""
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
        """Publishes new weights at once, to all engines; with `interrupt` off, to idle engines only."""
        if PublishWeights in coordinator.awaiting or coordinator.served == coordinator.version:
            return []
        if self.settings.interrupt:
            return [PublishWeights(coordinator.version)]
        fleet, newest = coordinator.fleet, coordinator.version
        idle = tuple(e for e, served in enumerate(fleet.served) if served != newest and not fleet.running[e])
        return [PublishWeights(coordinator.version, idle)] if idle else []

    def _boundary(self, coordinator: Coordinator) -> Sequence[Instruction]:
        """Returns what is due after a step, while engines run on; at the end and at a stop the engines are emptied
        first."""
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
        # these come first, once the new weights are published
        if coordinator.evaluation_due() or coordinator.checkpoint_due():
            return []
        limit, version = self.settings.max_staleness, coordinator.version
        if any(version - entry.born >= limit for entry in ledger.at(*_UNDER_WAY)):
            return []
        candidates = [entry.group() for entry in ledger.at(PromptStage.SCORED)]
        if late := [group for group in candidates if versions_behind(group, version) > limit]:
            return [ledger.entries[group.prompt.draw].park() for group in late]
        chosen = compose(
            candidates,
            min(needed, len(candidates)),
            self.settings.prefer,
            version=version,
            max_staleness=limit,
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
        return generate(coordinator, entries, size, size, keep=lambda entry: entry.born > oldest, engines=engines)

    def _usable(self, coordinator: Coordinator) -> list[int]:
        """Returns the engines that get new requests: all, or those that serve the newest weights already."""
        fleet = coordinator.fleet
        if self.ratio and self.settings.interrupt:
            return list(range(len(fleet)))
        return [engine for engine, served in enumerate(fleet.served) if served == coordinator.version]

    def _room(self, coordinator: Coordinator) -> int:
        """Returns the number of prompts that may be submitted now."""
        settings = coordinator.settings
        steps = min(1 + self.ratio * self.settings.max_staleness, settings.steps - coordinator.step)
        return math.floor(steps * settings.prompts_per_step) - coordinator.ledger.live

    def state_dict(self) -> State:
        return {"pid": self._pid.state_dict()} | {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: SavedState) -> None:
        """Restores the ratio and the barriers; after another policy's state, this policy starts afresh."""
        if "pid" not in state:
            return
        self._pid.load_state_dict(state["pid"])
        for name in _SAVED:
            setattr(self, name, state[name])


def staleness(metrics: Mapping[str, float], max_staleness: int) -> float:
    """Returns the distance between the policy and the one that generated its data, in [0, 1] (Flux, component 1).

    The weighted sum of three metrics of a step, each divided by the value that counts as 1: KL(behaviour || policy) in
    nats, `staleness/kl`; `log1p` of the variance of importance weights, `staleness/variance`; the mean number of
    versions between generation and training, `staleness/lag_mean`. A step without them (a batch that no engine
    generated) has staleness 0.
    """
    kl = metrics.get("staleness/kl", 0.0) / KL_NORMALIZER
    variance = math.log1p(max(metrics.get("staleness/variance", 0.0), 0.0)) / VARIANCE_NORMALIZER
    gap = metrics.get("staleness/lag_mean", 0.0) / max(max_staleness, 1)
    total = KL_WEIGHT * kl + VARIANCE_WEIGHT * variance + GAP_WEIGHT * gap
    return min(max(total, 0.0), 1.0) if math.isfinite(total) else 1.0


_SAVED = ("staleness", "barriers", "barrier", "since_sync", "seen")
_UNDER_WAY = (PromptStage.RUNNING, PromptStage.STOPPING, PromptStage.COMPLETE, PromptStage.LOST)
