"""Fault histories: every policy on small random clusters on which everything goes wrong, and what must hold then.

A seed is a history; `python -m fluxjax.simulate --first-seed SEED --seeds 1` shows it again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..base.types import Group
from ..config import Policy
from ..coordinator import EngineLost
from ..coordinator.messages import (
    Accumulate,
    Event,
    Instruction,
    ParallelismSet,
    PublishWeights,
    ResponseFinished,
    Train,
)
from .options import SimulateConfig
from .promises import make_promises
from .run import make_cluster
from .scenarios import scenario

CHUNK = 50  # histories that a process is given at once


@dataclasses.dataclass(frozen=True)
class Report:
    """`wrong` is empty if everything held. `trace` is a fingerprint of all that was heard and said, with its times."""

    seed: int
    policy: str
    trace: int
    wrong: str
    lost: bool  # the engines failed so often that the coordinator gave up, as it should
    events: int
    crashes: int


class History:
    """One run, watched."""

    def __init__(self, config: SimulateConfig) -> None:
        self.config, self.cluster = config, make_cluster(config, self._watch)
        self.promises = make_promises(config, self.cluster.coordinator.settings)
        self.trace = 0
        self.lost = False
        self.steps: list[int] = []
        self.groups: list[tuple[int, Group]] = []  # with the version of the trainer when they were trained on
        self.published: list[list[int]] = [[0] for _ in self.cluster.rollout.engines]

    def _watch(self, now: float, what: Event | Instruction) -> None:
        self.promises.see(what)
        name = what.response.rid if isinstance(what, ResponseFinished) else getattr(what, "rid", "")
        self.trace = zlib.crc32(f"{now!r} {type(what).__name__} {name}".encode(), self.trace)
        if isinstance(what, Train | Accumulate):
            self.groups += [(self.cluster.coordinator.version, group) for group in what.groups]
        if isinstance(what, Train):
            self.steps.append(what.step)
        elif isinstance(what, ParallelismSet):
            self.published = [[0] for _ in range(what.engines)]
        elif isinstance(what, PublishWeights):
            for engine in what.engines or range(len(self.published)):
                self.published[engine].append(what.version)

    def run(self) -> str:
        """The first thing that does not hold; empty if all does."""
        try:
            self.cluster.run()
        except EngineLost:
            self.lost = True
        except Exception as error:  # whatever it is, it is a finding
            return f"{type(error).__name__}: {error}"
        return next(iter(self.promises.wrong), "") or next(self._wrong(), "")

    def _wrong(self) -> Iterator[str]:
        ledger, options = self.cluster.coordinator.ledger, self.cluster.coordinator.settings
        draws = [group.prompt.draw for _, group in self.groups]
        training = 0 if self.cluster.coordinator.finished else len(draws) - ledger.trained
        places = Counter(draws) + Counter(one.draw for one in ledger.skipped)
        places += Counter(draw for draw in ledger.entries if not training or draw not in places)
        if places != Counter(range(ledger.drawn)):
            yield f"prompts that are not in one place: {dict(places - Counter(range(ledger.drawn)))}"
        if most := [
            one for one in Counter((g.prompt.epoch, g.prompt.id) for _, g in self.groups).items() if one[1] > 1
        ]:
            yield f"trained on more than once in an epoch: {most}"
        if any(not skipped.reason for skipped in ledger.skipped):
            yield "a prompt was skipped without a reason"
        if self.steps != list(range(1, len(self.steps) + 1)):
            yield f"steps {self.steps}"
        if not self.lost and not (self.cluster.coordinator.exhausted or len(self.steps) == options.steps):
            yield f"{len(self.steps)} steps of {options.steps}"
        for versions in self.published:
            if any(after < before for before, after in pairwise(versions)):
                yield f"versions {versions} of an engine"
        for version, group in self.groups:
            yield from self._wrong_group(version, group)

    def _wrong_group(self, version: int, group: Group) -> Iterator[str]:
        samples = [sample.response.sample for sample in group.samples]
        if len(set(samples)) != len(samples) or len(samples) != self.config.rollout.group_size:
            yield f"draw {group.prompt.draw} was trained on with samples {samples}"
        for response in (sample.response for sample in group.samples):
            versions = response.versions
            if not versions or any(after < before for before, after in pairwise(versions)):
                yield f"response {response.rid} has {len(versions)} tokens of versions {sorted(set(versions))}"
            elif not version - max_staleness(self.config) <= versions[0] <= versions[-1] <= version:
                yield f"response {response.rid} of versions {sorted(set(versions))} was trained on at version {version}"


def max_staleness(config: SimulateConfig) -> int:
    """Versions that what is trained on may be old."""
    limits = {Policy.APRIL: config.april.max_staleness, Policy.ADAPTIVE_ASYNC: config.adaptive_async.max_staleness}
    return limits.get(config.policy.name, 0)


def check(seed: int) -> Report:
    config = scenario(seed)
    history = History(config)
    wrong = history.run()
    cluster = history.cluster
    return Report(
        *(seed, config.policy.name.value, history.trace, wrong),
        *(history.lost, cluster.events, cluster.rollout.crashes),
    )


def check_some(seeds: Iterable[int]) -> list[Report]:
    return [check(seed) for seed in seeds]


def check_many(seeds: range, jobs: int = 1, as_json: bool = False) -> int:
    """Prints what went wrong, and a summary; 1 if anything did."""
    began, reports = time.perf_counter(), []
    chunks = [seeds[first : first + CHUNK] for first in range(0, len(seeds), CHUNK)]
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        for some in pool.map(check_some, chunks) if jobs > 1 else map(check_some, chunks):
            reports += some
            for report in some:
                if report.wrong:
                    print(f"seed {report.seed}, {report.policy}: {report.wrong}", file=sys.stderr, flush=True)
            if sys.stderr.isatty():
                print(f"{len(reports)}/{len(seeds)}", end="\r", file=sys.stderr, flush=True)
    failed = [report.seed for report in reports if report.wrong]
    result = {
        "histories": len(reports),
        "failed": failed,
        "by_policy": dict(Counter(report.policy for report in reports)),
        "engines_given_up": sum(report.lost for report in reports),
        "events": sum(report.events for report in reports),
        "crashes": sum(report.crashes for report in reports),
        "trace": zlib.crc32(repr([report.trace for report in reports]).encode()),  # the same for the same seeds
        "wall_seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(result) if as_json else "\n".join(f"{name}: {value}" for name, value in result.items()))
    return 1 if failed else 0
