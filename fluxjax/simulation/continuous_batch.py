"""The contents of a simulated engine, without time: samples that run, samples that wait, and the cache they share.

Tokens are counted by steps: a running sample has one more token for each decode step since it was let in.
"""

import bisect
import heapq
import math
from collections import deque
from itertools import pairwise
from typing import NamedTuple

Segments = tuple[tuple[int, int], ...]


class SampleProgress(NamedTuple):
    """The number of a sample's tokens so far; `segments` are (weight version, number of tokens)."""

    rid: str
    sample: int
    tokens: int
    segments: Segments


class Sequence:
    """A sample that will have `total` tokens behind a prompt of `prompt` tokens."""

    __slots__ = ("generated", "joined", "mark", "prompt", "rid", "sample", "segments", "total", "waits")

    def __init__(self, rid: str, sample: int, prompt: int, total: int, begun: Segments) -> None:
        self.rid, self.sample, self.prompt, self.total = rid, sample, prompt, total
        self.joined = 0  # the decode step at which the sample was let in
        self.mark = -1  # the decode step that makes the last token; -1: the sample does not run
        self.segments = begun  # segments of the tokens that the sample had when it was let in
        self.generated = sum(tokens for _, tokens in begun)
        self.waits = True


class Batch:
    """Samples that share a cache of `kv_limit` tokens; at most `max_running` run at once."""

    def __init__(self, kv_limit: int, max_running: int, version: int) -> None:
        self.kv_limit, self.max_running = kv_limit, max_running
        self.kv = 0  # tokens in the cache
        self.steps = 0  # decode steps so far
        self.version = version
        self.running: dict[Sequence, None] = {}  # samples in the order of their admission
        self.waiting = 0
        self.preemptions = self.decoded = 0
        self._queue: deque[Sequence] = deque()  # samples that wait, and some removed samples
        self._marks: list[tuple[int, int, Sequence]] = []  # heap of (mark, serial, sample), with some stale entries
        self._serial = 0
        self._versions = [(0, version)]  # (first step, version)
        self._watermark = kv_limit // 100  # tokens left for running samples when a sample is let in

    def add(self, sequence: Sequence) -> None:
        self._queue.append(sequence)
        self.waiting += 1

    def fits(self, sequence: Sequence, kv: int) -> bool:
        """Says whether a sample may be let in, with `kv` tokens in the cache."""
        running = len(self.running)
        if not running:
            return True
        room = max(running + 1, self._watermark)
        return running < self.max_running and kv + sequence.prompt + sequence.generated + room <= self.kv_limit

    def admit(self) -> int:
        """Lets in waiting samples in their order while there is room; returns the number of tokens to prefill."""
        queue, computed = self._queue, 0
        while self.waiting:
            sequence = queue[0]
            if sequence.waits:
                if not self.fits(sequence, self.kv):
                    break
                self._enter(sequence)
                computed += sequence.prompt + sequence.generated
            queue.popleft()
        return computed

    def _enter(self, sequence: Sequence) -> None:
        self.waiting -= 1
        self._serial += 1
        sequence.waits = False
        sequence.joined = self.steps
        sequence.mark = self.steps + sequence.total - sequence.generated
        heapq.heappush(self._marks, (sequence.mark, self._serial, sequence))
        self.running[sequence] = None
        self.kv += sequence.prompt + sequence.generated

    def preempt(self) -> None:
        """Expels the samples let in last until each remaining sample has room for a token."""
        while self.kv + len(self.running) > self.kv_limit:
            self._expel(next(reversed(self.running)))
            self.preemptions += 1

    def expel_all(self) -> None:
        """Makes all running samples wait again, in the same order, before samples that already waited."""
        for sequence in tuple(reversed(self.running)):
            self._expel(sequence)

    def _expel(self, sequence: Sequence) -> None:
        _, _, sequence.generated, sequence.segments = self.remove(sequence)
        sequence.waits = True
        self._queue.appendleft(sequence)
        self.waiting += 1

    def remove(self, sequence: Sequence) -> SampleProgress:
        """Removes a running or waiting sample, and returns its progress."""
        progress = SampleProgress(sequence.rid, sequence.sample, *self._generated(sequence))
        if sequence.waits:
            sequence.waits = False
            self.waiting -= 1
        else:
            del self.running[sequence]
            sequence.mark = -1
            self.kv -= sequence.prompt + progress.tokens
        return progress

    def horizon(self) -> int:
        """Returns the decode steps until a sample ends or the cache is full. At least one sample must run, and each
        running sample must have room for a token."""
        marks = self._marks
        while marks[0][2].mark != marks[0][0]:
            heapq.heappop(marks)
        return min(marks[0][0] - self.steps, (self.kv_limit - self.kv) // len(self.running))

    def advance(self, steps: int) -> None:
        """Gives every running sample one token in each of `steps` decode steps."""
        tokens = steps * len(self.running)
        self.steps += steps
        self.kv += tokens
        self.decoded += tokens

    def ended(self) -> list[SampleProgress]:
        """Removes and returns the samples that have their last token, in the order in which they were let in."""
        marks, steps, found = self._marks, self.steps, []
        while marks and marks[0][0] <= steps:
            mark, _, sequence = heapq.heappop(marks)
            if sequence.mark == mark:
                found.append(self.remove(sequence))
        return found

    def _generated(self, sequence: Sequence) -> tuple[int, Segments]:
        """Returns the number of a sample's tokens so far, and the segments of these tokens."""
        if sequence.waits:
            return sequence.generated, sequence.segments
        segments = list(sequence.segments)
        served = bisect.bisect(self._versions, (sequence.joined, math.inf)) - 1  # the version at step `joined`
        for (first, version), (end, _) in pairwise([*self._versions[served:], (self.steps, -1)]):
            if tokens := end - max(first, sequence.joined):
                if segments and segments[-1][0] == version:
                    tokens += segments.pop()[1]
                segments.append((version, tokens))
        return sequence.generated + self.steps - sequence.joined, tuple(segments)

    def change_version(self, version: int) -> None:
        """Counts the decode steps from now on as steps of `version`."""
        if version != self.version:
            self.version = version
            self._versions.append((self.steps, version))
