"""A simulated inference engine: continuous batching, a KV cache of limited size, preemption by recomputation.

It works as vLLM and SGLang do, in steps. At the end of each step the engine

1. preempts the youngest samples while the cache has no room for one more token of everybody; what they had is dropped
   and computed anew when there is room (Flexes, section 4.2),
2. lets in waiting samples in their order, as far as cache and `max_running` allow, and fills the cache with their
   prompts and what they had generated: a step of prefill, in which nobody else goes on,
3. or else decodes: one token for every running sample.

Time is not walked through token by token. While nothing enters or leaves, the time of n steps is a sum in closed form,
so the engine jumps to the next step at which something happens: a sample's last token, a full cache. What comes from
outside (a new sample, an abort, an update) cuts the jump short at the end of the step that is under way. An event costs
O(log n). The inside is `stepping.py` (time) and `batch.py` (samples and cache).
"""

from __future__ import annotations

from collections.abc import Callable

from .batch import Progress, Segments, Sequence
from .clock import Action, Clock
from .costs import EngineCost
from .stepping import Phase, Stepper

OnFinish = Callable[[str, int, int, Segments], object]


class SimulatedEngineError(RuntimeError):
    """A sample that can't be generated here."""


class SimulatedEngine(Stepper):
    """One engine of `degree` GPUs. `on_finish(rid, sample, tokens, segments)` is called when a sample has all its
    tokens; `segments` are (weight version, tokens) of what was generated since it was submitted here. It may submit and
    abort."""

    def __init__(
        self,
        clock: Clock,
        cost: EngineCost,
        degree: int,
        on_finish: OnFinish,
        max_running: int = 256,
        version: int = 0,
    ) -> None:
        super().__init__(clock, cost, degree, max_running, version)
        self.on_finish = on_finish
        self._requests: dict[str, dict[int, Sequence]] = {}

    def submit(self, rid: str, sample: int, prompt_tokens: int, total_tokens: int, begun: int = 0) -> None:
        """A sample that ends with `total_tokens` tokens of its own, of which `begun` exist already. Raises
        SimulatedEngineError if the engine is down, if there is such a sample, if it has nothing left to generate or can
        never fit."""
        if self.phase is Phase.DOWN:
            raise SimulatedEngineError(f"{rid}/{sample} is submitted to an engine that is down")
        batch = self.batch
        if not 0 <= begun < total_tokens or prompt_tokens + total_tokens > batch.kv_limit:
            raise SimulatedEngineError(
                f"{rid}/{sample} has {prompt_tokens} + {total_tokens} tokens, {begun} of them begun; "
                f"the cache holds {batch.kv_limit}"
            )
        samples = self._requests.setdefault(rid, {})
        if sample in samples:
            raise SimulatedEngineError(f"{rid}/{sample} is here already")
        sequence = samples[sample] = Sequence(rid, sample, prompt_tokens, total_tokens, begun)
        # Behind others it can't be let in before them, and what they wait for is an event of its own.
        first = not batch.waiting
        batch.add(sequence)
        if self.phase is Phase.IDLE or (first and batch.fits(sequence, self.kv_tokens, len(batch.running))):
            self.interrupt()

    def abort(self, name: str) -> list[Progress]:
        """Ends a request (`rid`) or one sample (`rid/i`) and says what each had; nothing for what isn't here."""
        found = self._find(name)
        if found:
            self.interrupt()
        ended = [self._progress(sequence, 0) for sequence in found]
        for sequence in found:
            self.batch.remove(sequence)
            self._forget(sequence)
        return ended

    def progress(self, name: str) -> list[Progress]:
        """What each sample of a request, or one sample, has so far; nothing for what isn't here."""
        ahead = self.elapsed()
        return [self._progress(sequence, ahead) for sequence in self._find(name)]

    def pause(self) -> None:
        """No step begins after the one that is under way. Running samples keep their cache."""
        self._paused = True
        self.interrupt()

    def resume(self) -> None:
        self._paused = False
        self.interrupt()

    def update(
        self, seconds: float, version: int | None = None, recompute: bool = False, done: Action | None = None
    ) -> None:
        """New weights: stands still for `seconds` from the end of the step under way, then generates under `version`.
        `recompute` fills the cache anew under the new weights. `done` is called then, unless the engine crashes before.
        Updates follow one another. Raises SimulatedEngineError if the engine is down."""
        if self.phase is Phase.DOWN:
            raise SimulatedEngineError("new weights for an engine that is down")
        self._updates.append((seconds, version, recompute, done))
        self.interrupt()

    def slow_down(self, factor: float) -> None:
        """From the next step on, everything takes `factor` times as long as it should."""
        self._slowdown = factor
        self.interrupt()

    def crash(self) -> list[Progress]:
        """Everything is lost, waiting updates too; the answer says what was here. Down until `recover`."""
        lost = [progress for rid in self._requests for progress in self.progress(rid)]
        self.halt()
        for samples in self._requests.values():
            for sequence in samples.values():
                self.batch.remove(sequence)
        self._requests.clear()
        return lost

    def recover(self, version: int | None = None) -> None:
        """Up again after a crash, empty, with the weights of `version` (None: those it had)."""
        if self.phase is Phase.DOWN:
            self.phase, self._paused = Phase.IDLE, False
            if version is not None:
                self.batch.change_version(version)

    @property
    def up(self) -> bool:
        return self.phase is not Phase.DOWN

    @property
    def version(self) -> int:
        return self.batch.version

    @property
    def running(self) -> int:
        return len(self.batch.running)

    @property
    def waiting(self) -> int:
        return self.batch.waiting

    @property
    def preemptions(self) -> int:
        return self.batch.preemptions

    @property
    def decoded(self) -> int:
        """Tokens generated so far, those of samples that were aborted too."""
        return self.batch.decoded + self.elapsed() * len(self.batch.running)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache."""
        return self.batch.kv + self.elapsed() * len(self.batch.running)

    def report(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            self._forget(sequence)
        for sequence in ended:
            self.on_finish(sequence.rid, sequence.sample, sequence.total, sequence.segments)

    def _find(self, name: str) -> list[Sequence]:
        rid, _, sample = name.partition("/")
        samples = self._requests.get(rid, {})
        if not sample:
            return list(samples.values())
        return [samples[int(sample)]] if int(sample) in samples else []

    def _forget(self, sequence: Sequence) -> None:
        samples = self._requests[sequence.rid]
        del samples[sequence.sample]
        if not samples:
            del self._requests[sequence.rid]

    def _progress(self, sequence: Sequence, ahead: int) -> Progress:
        batch = self.batch
        return Progress(sequence.rid, sequence.sample, batch.tokens(sequence, ahead), batch.segments(sequence, ahead))
