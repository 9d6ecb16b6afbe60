"""A device's memory by kind, in each phase of a step; whether a run fits; and the settings that would make it fit."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

GIB = 2.0**30
# The kinds of an engine's bytes. FSDP does not cut these bytes. A layer with Gated DeltaNet has a state for each slot.
OF_ENGINES = ENGINE, CACHE, STATES = "engine weights", "KV cache", "states"


def in_gib(size: float) -> str:
    """Returns a size in bytes as text in GiB; a size below 1 GiB has three significant digits."""
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.3g}"


@dataclasses.dataclass(frozen=True)
class Account:
    """Bytes on the fullest device. `resident` has, by kind, the arrays that stay in memory through all of a step;
    with `sleeping`, the arrays of engines do not stay. `temporaries` and `results` are the bytes of each program."""

    resident: Mapping[str, float]
    gradients: float  # the sum of the microbatches' gradients, as one set of arrays
    batch: float
    largest_weight: float  # the largest weight (of all layers of a stack), as engines get it
    temporaries: Mapping[str, float]
    results: Mapping[str, float]
    copies: float = 0.0  # weights in the dtype of the computation, as microbatches read them
    merged: float = 0.0  # weights with their adapters added (LoRA), while they are published
    servers: float = 0.0  # memory of servers on the same device while they are awake; training then waits
    sleeping: bool = False  # engines have no memory while training computes, and no cache while they get new weights

    def phases(self) -> dict[str, dict[str, float]]:
        """Returns bytes by phase and kind. With servers, `temporaries` and the result lack `prefill` and `decode`."""

        def held(more: Mapping[str, float], without: Collection[str] = ()) -> dict[str, float]:
            kinds = {**self.resident, **more}
            return {kind: size for kind, size in kinds.items() if size and not (self.sleeping and kind in without)}

        def during(program: str, more: Mapping[str, float], without: Collection[str] = ()) -> dict[str, float]:
            return held({**more, "temporaries": self.temporaries[program] + self.results[program]}, without)

        gradients, batches = {"gradients": self.gradients}, {"batches": 2 * self.batch}  # this and the next batch
        phases = {
            "accumulate": during("accumulate", gradients | batches | {"cast weights": self.copies}, OF_ENGINES),
            "update": during("update", gradients, OF_ENGINES),
            "logprobs": during("logprobs", batches, OF_ENGINES),
        }
        phases |= {name: during(name, {}) for name in ("prefill", "decode") if name in self.temporaries}
        awake = {"servers": self.servers}
        if self.servers:
            phases["rollout"] = held(awake)
        # An engine replaces its weights one by one (`rollout.engine_weights.split_layers`).
        updating = awake | {"merged weights": self.merged, "temporaries": self.largest_weight}
        return phases | {"publish": held(updating, (CACHE, STATES))}

    def totals(self) -> dict[str, float]:
        """Returns bytes by phase."""
        return {phase: sum(kinds.values()) for phase, kinds in self.phases().items()}

    def peak(self) -> tuple[str, float]:
        """Returns (the phase that needs most, its bytes)."""
        totals = self.totals()
        phase = max(totals, key=lambda name: totals[name])
        return phase, totals[phase]

    @property
    def bytes(self) -> float:
        return self.peak()[1]

    def with_temporaries(self, program: str, size: float) -> Account:
        return dataclasses.replace(self, temporaries={**self.temporaries, program: max(size, 0.0)})

    def with_cache(self, share: float) -> Account:
        """Returns the account for caches with `share` times as many tokens."""
        return dataclasses.replace(self, resident={**self.resident, CACHE: share * self.resident[CACHE]})

    def with_slots(self, share: float) -> Account:
        """Returns the account for `share` times as many slots: caches, states and decoding's temporaries scale."""
        states = share * self.resident.get(STATES, 0.0)
        account = dataclasses.replace(self, resident={**self.resident, STATES: states}).with_cache(share)
        return account.with_temporaries("decode", share * self.temporaries["decode"])

    def with_devices(self, factor: float) -> Account:
        """Returns the account for `factor` times as many devices. Arrays that FSDP cuts become smaller."""
        resident = {kind: size if kind in OF_ENGINES else size / factor for kind, size in self.resident.items()}
        sizes = {name: getattr(self, name) / factor for name in ("gradients", "copies", "merged")}
        cut = dataclasses.replace(self, resident=resident, **sizes)
        return cut.with_temporaries("update", self.temporaries["update"] / factor)


@dataclasses.dataclass(frozen=True)
class RowGrowth:
    """The growth of a program's temporaries with the tokens of a row: a straight line through two compiled lengths."""

    tokens: int  # tokens of a row in the account that is given to the methods
    slope: float  # bytes a token

    def account(self, account: Account, tokens: int) -> Account:
        """Returns the account for rows of `tokens` tokens."""
        more = (tokens - self.tokens) * self.slope
        account = account.with_temporaries("accumulate", account.temporaries["accumulate"] + more)
        share = tokens / self.tokens
        scored = account.temporaries["logprobs"] * max(share, 1.0)  # some temporaries do not shrink with rows
        return dataclasses.replace(account.with_temporaries("logprobs", scored), batch=share * account.batch)

    def largest(self, account: Account, usable: float, step: int = 256) -> int:
        """Returns the tokens of the longest row with which all phases fit, a multiple of `step`; 0 if no row fits."""
        rows = range(step, step << 20, step)  # ascending, and so are the bytes
        return step * bisect.bisect(rows, usable, key=lambda tokens: self.account(account, tokens).bytes)


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Settings that make a run fit, or need less memory, and the bytes that the run then needs."""

    settings: tuple[str, ...]
    bytes: float

    def __str__(self) -> str:
        return f"{' '.join(self.settings)}  ->  {in_gib(self.bytes)} GiB"


# Returns a setting, as on the command line, and the account with that setting; None if the change can't be made.
Change: TypeAlias = Callable[[Account], tuple[str, Account] | None]


def remedies(account: Account, usable: float, changes: Sequence[Change]) -> list[Remedy]:
    """Returns each change that alone makes the run fit. If no change does, returns one remedy of several changes, up to
    the first with which the run fits; the run may not fit even with all changes."""
    alone = [found for change in changes if (found := change(account)) is not None]
    if fitting := [Remedy((setting,), changed.bytes) for setting, changed in alone if changed.bytes <= usable]:
        return fitting
    settings: list[str] = []
    for change in changes:
        found = change(account)
        if found is not None and found[1].bytes < account.bytes:
            settings.append(found[0])
            account = found[1]
        if account.bytes <= usable:
            break
    return [Remedy(tuple(settings), account.bytes)] if settings else []
