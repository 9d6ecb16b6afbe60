"""Fault histories: every policy on small random clusters on which everything goes wrong, checked for what must hold.

    python -m tests.histories --seeds 10000 --jobs 2
    python -m tests.histories --seeds 1 --first-seed SEED     # a seed is a history: this shows it again

A history must lose nothing, and its policy must keep its promises (`promises/`). Prints what went wrong and a summary,
with --json as one JSON line; the status is 1 if anything went wrong.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import random
import sys
import time
import zlib
from collections import Counter

from fluxjax.base.types import Group
from fluxjax.config import POLICIES, DynamicSampling, SynchronousConfig
from fluxjax.config.learning import PREFERENCES, AdaptiveAsyncConfig, AprilConfig, TailBatchingConfig
from fluxjax.coordinator import EngineLost
from fluxjax.coordinator.messages import Accumulate, Event, Instruction, ResponseFinished, Train
from fluxjax.coordinator.policies.adaptive_async import AdaptiveAsync
from fluxjax.simulation.options import Model, Rewards, SimulateConfig
from fluxjax.simulation.simulated_run import make_cluster

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))  # pytest does the same for tests

from promises import make_promises, misplaced
from promises.adaptive_async_promises import AdaptiveAsyncPromises

CHUNK = 50  # histories that a process is given at once


def scenario(seed: int) -> SimulateConfig:
    """Draws a cluster, a policy and faults at random from a seed. Policies take turns."""
    dice, config = random.Random(seed), SimulateConfig(seed=seed)
    sim, faults = config.simulation, config.simulation.faults
    name = tuple(POLICIES)[seed % len(POLICIES)]
    if dice.random() < 0.25:
        config.rollout.dynamic_sampling = DynamicSampling.CORRECT
    config.rollout.max_num_gen_batches = 0  # a step of a single prompt may well need more than ten
    config.steps = dice.randint(1, 8)
    config.rollout.prompts_per_step = dice.randint(1, 5)
    config.rollout.group_size = dice.randint(2, 4)
    config.rollout.max_new_tokens = dice.choice((256, 1024, 4096))
    config.evaluation.every, config.checkpoint.every = dice.randint(0, 3), dice.randint(0, 3)
    tail = TailBatchingConfig(dice.choice((1.0, 1.25, 2.0)), dice.choice((1.0, 1.25, 2.0)))
    april = AprilConfig(dice.choice((1.0, 1.5, 2.5)), dice.randint(0, 3))
    adaptive = AdaptiveAsyncConfig(max_staleness=dice.randint(0, 4), interrupt=dice.random() < 0.7)
    dice.choice((2, 5, 100))
    if dice.random() < 0.3:
        adaptive.ratio = dice.choice((0.0, 1.0))
    config.policy = {"tail_batching": tail, "april": april, "adaptive_async": adaptive}.get(name, SynchronousConfig())
    sim.model, sim.degree, sim.memory_fraction = Model.QWEN_7B, 1, dice.choice((0.25, 0.6))
    sim.train_gpus = dice.choice((0, 0, 1))
    sim.gpus = dice.randint(1, 4) + sim.train_gpus
    sim.median, sim.spread = dice.choice((30.0, 150.0)), dice.choice((0.5, 1.05))
    sim.max_running = dice.choice((2, 8, 64))
    sim.prompts, sim.epochs = dice.randint(3, 40), dice.randint(0, 2)
    sim.rewards, sim.recompute = dice.choice(list(Rewards)), dice.random() < 0.5
    sim.evaluation_seconds = sim.checkpoint_seconds = dice.choice((0.0, 5.0))
    sim.reply_limit = dice.choice((5.0, 60.0))
    rounds = name != "adaptive_async"
    config.parallelism.min_degree = int(rounds and sim.rollout_gpus in (2, 4) and dice.random() < 0.4)
    dice.randint(1, 3)
    sim.degree = dice.choice((1, 2)) if config.parallelism.enabled else 1
    config.stream_trainer = rounds and sim.engines > 1 and dice.random() < 0.5
    faults.crash_every, faults.down = dice.choice((0.0, 60.0, 300.0)), dice.choice((1.0, 40.0))
    faults.slow_every, faults.slow_for = dice.choice((0.0, 50.0)), 20.0
    faults.lost = dice.choice((0.0, 0.02))
    faults.doubled, faults.late = dice.choice((0.0, 0.1)), dice.choice((0.0, 0.1))
    faults.delay, faults.sync_delay = dice.choice((1.0, 30.0)), 10.0
    faults.slow_sync, faults.reward_hangs = dice.choice((0.0, 0.3)), dice.choice((0.0, 0.05))
    _more(random.Random(f"{seed} rest"), config)
    config.validate()
    return config


def _more(dice: random.Random, config: SimulateConfig) -> None:
    """Draws settings that were added later from dice of their own, so that a seed keeps its older ones."""
    policy = config.policy
    if dice.random() < 0.2:
        config.rollout.prompts_per_step = dice.randint(6, 16)
    if dice.random() < 0.05:
        config.simulation.prompts = 1
    if not isinstance(policy, AdaptiveAsyncConfig) and dice.random() < 0.3:
        config.speculative_sync = dice.choice((0.1, 0.5))
    if dice.random() < 0.3:
        texts = "linear(1.2, 0.8)", "success(1.3, 0.7)", "math: 1.0; *: cosine(1.2, 0.8)"
        config.rollout.temperature = dice.choice(texts)
    if isinstance(policy, TailBatchingConfig) and dice.random() < 0.3:
        policy.prompts, policy.responses = "phases(1.5@0, 1.0@0.4, 2.0@0.7)", "linear(2.0, 1.0)"
    if isinstance(policy, AdaptiveAsyncConfig):
        first = ["stalest"] if dice.choice((False, True)) else []
        policy.prefer = (*first, *(name for name in PREFERENCES[1:] if dice.random() < 0.3))
        if dice.random() < 0.3:
            policy.target_staleness = "linear(0.05, 0.3)"
    if isinstance(policy, TailBatchingConfig):
        early = config.stream_trainer or config.speculative_sync
        policy.max_staleness = 0 if early else dice.choice((0, 1, 2, 5))
    if dice.random() < 0.4:
        sim, faults = config.simulation, config.simulation.faults
        sim.turns, sim.observation_tokens = dice.randint(2, 20), dice.choice((1, 5, 100))
        sim.environment_seconds, faults.environment_fails = dice.choice((0.0, 2.0, 60.0)), dice.choice((0.0, 0.01))


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a seed. `wrong` is empty if everything held; `trace` is a fingerprint of all that was heard and
    said, with its times."""

    seed: int
    policy: str
    trace: int
    wrong: str
    lost: bool  # the engines failed so often that the coordinator gave up, as it should
    events: int
    crashes: int


class History:
    """A run whose events and instructions are watched and checked."""

    def __init__(self, config: SimulateConfig) -> None:
        self.config, self.cluster = config, make_cluster(config, self._watch)
        self.promises = make_promises(config, self.cluster.coordinator.settings)
        dice, coordinator = random.Random(f"{config.seed} constants"), self.cluster.coordinator
        if isinstance(coordinator.policy, AdaptiveAsync) and isinstance(self.promises, AdaptiveAsyncPromises):
            coordinator.policy.sync_interval = self.promises.sync_interval = dice.choice((2, 5, 100))
        calm = dice.randint(1, 3)
        for planner in (coordinator.parallelism, getattr(self.promises, "planner", None)):
            if planner is not None:
                planner.calm = calm
        self.trace = 0
        self.lost = False
        self.groups: list[Group] = []  # that were trained on

    def _watch(self, now: float, what: Event | Instruction) -> None:
        self.promises.see(what)
        name = what.response.rid if isinstance(what, ResponseFinished) else getattr(what, "rid", "")
        self.trace = zlib.crc32(f"{now!r} {type(what).__name__} {name}".encode(), self.trace)
        if isinstance(what, Train | Accumulate):
            self.groups += what.groups

    def run(self) -> str:
        """Runs to the end and returns the first thing that does not hold; empty if all does."""
        try:
            self.cluster.run()
        except EngineLost:
            self.lost = True
        except Exception as error:  # whatever it is, it is a finding
            return f"{type(error).__name__}: {error}"
        lost = misplaced(self.cluster.coordinator, [group.prompt.draw for group in self.groups])
        return next(iter(self.promises.wrong), f"prompts that are not in one place: {dict(lost)}" if lost else "")


def check(seed: int) -> Report:
    """Runs the history of a seed."""
    history = History(scenario(seed))
    wrong, cluster = history.run(), history.cluster
    policy = history.config.policy.name
    return Report(seed, policy, history.trace, wrong, history.lost, cluster.events, cluster.rollout.crashes)


def check_many(seeds: range, jobs: int = 1, as_json: bool = False) -> int:
    """Runs the histories of all `seeds` and prints what went wrong, and a summary; returns 1 if anything did."""
    began, reports = time.perf_counter(), []
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        for report in pool.map(check, seeds, chunksize=CHUNK) if jobs > 1 else map(check, seeds):
            reports.append(report)
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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="number of histories")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    return check_many(range(options.first_seed, options.first_seed + options.seeds), options.jobs, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
