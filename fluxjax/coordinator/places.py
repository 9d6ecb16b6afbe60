"""The books of preprocessors: which one looks at a medium, and which one holds it: FlexRL's MetaStore and balancing.

A pure state machine: each method is an event, and returns instructions. A key names a medium; a "place" is a
preprocessor. The holder of a requested medium looks at it, or else the preprocessor with the shortest queue. If a
preprocessor is lost or does not answer in time, others look at its media; the first answer counts.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias


@dataclasses.dataclass(frozen=True)
class Look:
    """The preprocessor is to look at the medium."""

    key: str
    place: str


@dataclasses.dataclass(frozen=True)
class Forget:
    """The preprocessor need not look at the medium any more."""

    key: str
    place: str


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """No preprocessor can look at the medium; its request is dropped. `reason` is that of the last preprocessor."""

    key: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Lapsed:
    """The preprocessor's lease is over: it has been silent for so long that it counts as lost."""

    place: str


Instruction: TypeAlias = Look | Forget | GiveUp | Lapsed


class MediumStage(enum.Enum):
    WAITS = "waits"  # for a preprocessor
    LOOKED_AT = "looked at"
    HELD = "held"
    UNUSABLE = "unusable"
    FAILED = "failed"  # at one preprocessor, or finally
    RELEASED = "released"
    JOINED = "joined"  # a preprocessor; no medium
    LOST = "lost"


class Transition(NamedTuple):
    key: str  # empty: the transition of a preprocessor
    place: str
    stage: MediumStage
    time: float


@dataclasses.dataclass
class _Wanted:
    place: str = ""  # the preprocessor that looks at the medium; empty: none yet
    failed: list[str] = dataclasses.field(default_factory=list)  # preprocessors that failed, in order


@dataclasses.dataclass
class _Living:
    """A living preprocessor in the books."""

    heard: float  # time of its last answer, or of its first request after it was idle
    keys: dict[str, None] = dataclasses.field(default_factory=dict)  # media that it looks at, in order
    given: int = 0  # requests so far


class Places:
    """The books of media and preprocessors. Times are seconds of any one clock. A preprocessor with requests that does
    not answer for `lease_seconds` is lost. A medium that fails `attempts` times is given up. The books remember the
    holders of the last `keep` media and the last `remember` transitions."""

    def __init__(
        self, lease_seconds: float, *, attempts: int = 4, keep: int = 1 << 16, remember: int = 1 << 14
    ) -> None:
        self._lease, self._attempts, self._keep = lease_seconds, attempts, keep
        self._wanted: dict[str, _Wanted] = {}
        self._held: dict[str, str] = {}  # the holder of each medium, the newest last
        self._living: dict[str, _Living] = {}
        self._history: collections.deque[Transition] = collections.deque(maxlen=remember)

    @property
    def living(self) -> tuple[str, ...]:
        """The living preprocessors."""
        return tuple(self._living)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The requested media that no preprocessor looks at, because none lives."""
        return tuple(key for key, wanted in self._wanted.items() if not wanted.place)

    def looks(self, place: str) -> tuple[str, ...]:
        """Returns the media that this preprocessor looks at."""
        return tuple(self._living[place].keys) if place in self._living else ()

    def holder(self, key: str) -> str:
        """Returns the preprocessor that holds the medium; empty if none is recorded."""
        return self._held.get(key, "")

    def nearest(self, key: str, busy: Mapping[str, int] | None = None) -> str:
        """Returns the preprocessor to ask for the medium: its holder, or else the one with the least work; `busy`
        counts each preprocessor's work beside its looks. Empty if no preprocessor lives."""
        return self._choice(key, (), busy or {})

    def place_joined(self, place: str, now: float) -> list[Instruction]:
        """Enters a preprocessor, which takes over its share of the others' queues. A preprocessor that is in the books
        already was restarted."""
        instructions = self.place_lost(place, now)
        self._living[place] = _Living(now)
        self._note("", place, MediumStage.JOINED, now)
        for key in self.waiting:
            instructions += self._dispatch(key, now)
        while (key := self._relief(place)) is not None:
            giver = self._wanted[key].place
            del self._living[giver].keys[key]
            instructions += [Forget(key, giver), *self._give(key, place, now)]
        return instructions

    def place_lost(self, place: str, now: float) -> list[Instruction]:
        """Removes a preprocessor and its holdings from the books: after a restart it holds nothing."""
        lost = self._living.pop(place, None)
        if lost is None:
            return []
        self._note("", place, MediumStage.LOST, now)
        self._held = {key: holder for key, holder in self._held.items() if holder != place}
        return [instruction for key in lost.keys for instruction in self._dispatch(key, now)]

    def wanted(self, key: str, now: float) -> list[Instruction]:
        """Enters the request to look at a medium. Several requests for a medium get one answer, for all callers."""
        if key in self._wanted:
            return []
        self._wanted[key] = _Wanted()
        return self._dispatch(key, now)

    def answered(self, key: str, place: str, now: float, *, usable: bool = True) -> list[Instruction]:
        """Enters that a preprocessor has looked at a medium. The first answer to a request counts, even a late one; if
        the medium is `usable`, the preprocessor holds it."""
        if (living := self._living.get(place)) is not None:
            living.heard = now
        wanted = self._wanted.pop(key, None)
        if wanted is None:
            return []
        instructions: list[Instruction] = []
        if wanted.place:
            self._living[wanted.place].keys.pop(key)
            if wanted.place != place:
                instructions.append(Forget(key, wanted.place))
        self._note(key, place, MediumStage.HELD if usable else MediumStage.UNUSABLE, now)
        if usable:
            self.hold(key, place)
        return instructions

    def failed(self, key: str, place: str, now: float, reason: str) -> list[Instruction]:
        """Enters that a preprocessor could not look at a medium, for a reason of its own: another one shall try."""
        if (living := self._living.get(place)) is not None:
            living.heard = now
        wanted = self._wanted.get(key)
        if wanted is None or wanted.place != place:
            return []
        self._living[place].keys.pop(key)
        self._note(key, place, MediumStage.FAILED, now)
        wanted.place = ""
        wanted.failed.append(place)
        if len(wanted.failed) < self._attempts:
            return self._dispatch(key, now)
        del self._wanted[key]
        return [GiveUp(key, reason)]

    def released(self, key: str, now: float) -> list[Instruction]:
        """Enters that nobody needs a medium or its holder any more."""
        wanted, holder = self._wanted.pop(key, None), self._held.pop(key, "")
        place = wanted.place if wanted is not None else holder
        if wanted is not None or holder:
            self._note(key, place, MediumStage.RELEASED, now)
        if wanted is None or not wanted.place:
            return []
        self._living[wanted.place].keys.pop(key)
        return [Forget(key, wanted.place)]

    def tick(self, now: float) -> list[Instruction]:
        """Enters that time has passed: preprocessors whose lease is over are lost."""
        silent = [p for p, living in self._living.items() if living.keys and now - living.heard >= self._lease]
        instructions: list[Instruction] = [Lapsed(place) for place in silent]
        for place in silent:
            instructions += self.place_lost(place, now)
        return [i for i in instructions if not isinstance(i, Look) or i.place in self._living]

    def hold(self, key: str, place: str) -> None:
        """Enters a hint from elsewhere that a preprocessor holds a medium."""
        if place not in self._living:
            return
        self._held.pop(key, None)
        self._held[key] = place
        if len(self._held) > self._keep:
            del self._held[next(iter(self._held))]

    def history(self) -> list[Transition]:
        """Returns the last transitions, oldest first."""
        return list(self._history)

    def _dispatch(self, key: str, now: float) -> list[Instruction]:
        wanted = self._wanted[key]
        place = self._choice(key, wanted.failed, {})
        if place:
            return self._give(key, place, now)
        wanted.place = ""
        self._note(key, "", MediumStage.WAITS, now)
        return []

    def _give(self, key: str, place: str, now: float) -> list[Instruction]:
        self._note(key, place, MediumStage.LOOKED_AT, now)
        self._wanted[key].place, living = place, self._living[place]
        if not living.keys:
            living.heard = now
        living.keys[key] = None
        living.given += 1
        return [Look(key, place)]

    def _relief(self, place: str) -> str | None:
        """Returns the last medium in the longest queue that this preprocessor can take over; None if there is none."""
        busiest = max(self._living, key=lambda name: len(self._living[name].keys))
        keys = self._living[busiest].keys
        if len(keys) - len(self._living[place].keys) < 2:
            return None
        movable = (k for k in reversed(keys) if self.holder(k) != busiest and place not in self._wanted[k].failed)
        return next(movable, None)

    def _choice(self, key: str, avoid: Iterable[str], busy: Mapping[str, int]) -> str:
        avoided = set(avoid)
        places = [place for place in self._living if place not in avoided] or list(self._living)
        if (holder := self._held.get(key, "")) in places:
            return holder
        living = self._living
        return min(places, key=lambda p: (len(living[p].keys) + busy.get(p, 0), living[p].given), default="")

    def _note(self, key: str, place: str, stage: MediumStage, now: float) -> None:
        self._history.append(Transition(key, place, stage, now))
