"""Servers on the devices that train: they sleep meanwhile. And servers of several degrees, one of which is awake."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from run_cases import flags
from runtime_cases import Run
from scripted_engine import ScriptedEngine

from fluxjax.base.types import Prompt, Response, Reward, TrainedStep
from fluxjax.config import Config, cli
from fluxjax.coordinator import Synchronous
from fluxjax.coordinator.engine_states import ParallelismPlanner
from fluxjax.coordinator.policies import early_training
from fluxjax.coordinator.policies.april import April
from fluxjax.coordinator.policies.early_training import StreamTrainer
from fluxjax.coordinator.policies.tail_batching import TailBatching
from fluxjax.learner.policy_trainer import PolicyTrainer
from fluxjax.report.metrics import read
from fluxjax.rewards import Scorer
from fluxjax.run.callbacks import Callback
from fluxjax.run.trainer import FluxTrainer
from fluxjax.runtime.engine_pool import engines_sleep
from rollout.jax_engine import JaxEngine

GAP = 1e-4  # absolute, float32


def content(run: Run) -> list[list[tuple]]:
    """What each step was trained on."""
    return [
        [(s.response.rid, s.response.token_ids, s.reward) for group in report.groups for s in group.samples]
        for report in run.diary.reports
    ]


@pytest.mark.parametrize("make", [Synchronous, TailBatching, April])
def test_training_has_the_devices_for_itself(make: Any) -> None:
    """All engines sleep whenever the trainer computes, wake with the new weights, and what is learnt is the same."""
    apart = Run(ScriptedEngine(), ScriptedEngine(), policy=make())
    apart.go()
    run = Run(ScriptedEngine(), ScriptedEngine(), policy=make())
    run.colocated = True
    train = run.trainer.train

    def alone(step, groups, prepared):
        assert all(engine.asleep and not engine.open_streams for engine in run.engines)
        return train(step, groups, prepared)

    run.trainer.train = alone
    run.go()
    assert content(run) == content(apart)
    for engine in run.engines:
        assert engine.log.count("sleep") == engine.log.count("wake") == 3
        assert engine.version == 3 and not engine.asleep
    assert not any("sleep" in engine.log for engine in apart.engines)


class Watch(Callback):
    """The servers as they are after each step."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[str, bool, int]]] = []

    def on_step(self, trainer: FluxTrainer, *_: Any) -> None:
        self.seen.append([(server.name, server.asleep, server.version) for server in trainer.pool.servers()])


def fleet(run_dir: pathlib.Path, data: Mapping[str, object], **own: object) -> Config:
    settings = {"checkpoint__every": 0, "evaluation__every": 0, "rollout__engine": "serve", **data, **own}
    return cli.load(["--config=configs/text.py:debug", f"--config.run_dir={run_dir}", *flags(**settings)])


def in_process(run_dir: pathlib.Path, data: Mapping[str, object], **own: object) -> Config:
    settings = {"checkpoint__every": 0, "evaluation__every": 2, "steps": 3, "warm_start__steps": 2, **data, **own}
    return cli.load(["--config=configs/text.py:debug", f"--config.run_dir={run_dir}", *flags(**settings)])


@pytest.mark.slow
def test_embedded_engines_have_no_memory_while_training_computes(
    data: Mapping[str, object], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cache and their weights are gone in each step, and the run ends with the bits of a run whose engines stay
    awake."""
    train, held = PolicyTrainer.train, list[tuple[bool, int]]()

    def watched(self: PolicyTrainer, *order: Any) -> TrainedStep:
        engine = trainer.engine
        assert isinstance(engine, JaxEngine) and trainer.pool.engines == [engine]
        held.append((engine.has_weights, engine.cache_usage.bytes))
        return train(self, *order)

    monkeypatch.setattr(PolicyTrainer, "train", watched)
    weights = []
    for name, sleeps in ("asleep", True), ("awake", False):
        if not sleeps:
            monkeypatch.setattr("fluxjax.run.trainer.engines_sleep", lambda *_: False)
        with FluxTrainer(in_process(tmp_path / name, data)) as trainer:
            assert trainer.fit().summary.complete
            weights.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
        assert [(has, bool(cache)) for has, cache in held] == [(not sleeps, not sleeps)] * 3
        held.clear()
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("settings", "alone", "own_policy", "sleep"),
    [
        ({}, True, False, True),
        ({"policy": "april"}, True, False, True),
        ({"policy": "tail_batching"}, True, False, True),
        ({}, False, False, False),  # process 0 reaches the engines of the other processes over HTTP
        ({}, True, True, False),  # such a policy may generate at any time
        ({"policy": "adaptive_async"}, True, False, False),
        ({"speculative_sync": 0.5}, True, False, False),
        ({"stream_trainer": True, "rollout__engines": 2}, True, False, False),
        ({"rollout__engine": "serve"}, True, False, False),
        ({"rollout__engine": "serve", "servers__colocated": True}, False, False, True),
    ],
)
def test_engines_sleep_if_nothing_is_generated_meanwhile(
    settings: dict[str, object], alone: bool, own_policy: bool, sleep: bool
) -> None:
    config = cli.load(["--config=configs/text.py:debug", *flags(**settings)])
    assert engines_sleep(config, alone, own_policy) is sleep


@pytest.mark.long
def test_a_run_with_servers_that_sleep(
    data: Mapping[str, object], forked_servers: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them sleeps already while the other one generates: the stream trainer has its device. In the first step,
    only the oldest groups are scored before it has trained on one, however soon the others are complete: else all may
    be over by the time that a server sleeps."""
    own: dict[str, object] = {"steps": 3, "sharding__devices": 2, "servers__count": 2, "servers__colocated": True}
    own |= {"policy": "april", "algorithm__importance__kind": "truncate", "stream_trainer": True}
    helper = functools.partial(StreamTrainer, first=0.1, last=0.9, chunk=1)
    monkeypatch.setattr(early_training, "StreamTrainer", helper)
    watch, score, accumulate, train = Watch(), Scorer.score, PolicyTrainer.accumulate, PolicyTrainer.train
    slept: list[list[bool]] = []
    streamed: list[Sequence[int]] = []

    async def in_time(self: Scorer, prompt: Prompt, response: Response) -> Reward:
        with contextlib.suppress(TimeoutError):  # then `lent` is empty
            async with asyncio.timeout(60):
                while prompt.draw >= 2 and not streamed:
                    await asyncio.sleep(0.005)
        return await score(self, prompt, response)

    def on_lent(self: PolicyTrainer, *order: Any) -> None:
        accumulate(self, *order)
        streamed.append(order[-1])

    def alone(self: PolicyTrainer, *order: Any) -> TrainedStep:
        slept.append([server.asleep for server in trainer.pool.servers()])
        return train(self, *order)

    monkeypatch.setattr(Scorer, "score", in_time)
    monkeypatch.setattr(PolicyTrainer, "accumulate", on_lent)
    monkeypatch.setattr(PolicyTrainer, "train", alone)
    with FluxTrainer(fleet(tmp_path / "run", data, **own), callbacks=[watch]) as trainer:
        result = trainer.fit()
        lent = [span for span in trainer.timeline.spans() if span.name == "train" and span.lane != "trainer"]
    assert result.summary.complete and 0 < result.summary.logprob_gap_max < GAP
    assert slept == [[True, True]] * 3
    assert len(streamed) == len(lent) > 0 and all(len(engines) == 1 for engines in streamed)
    assert watch.seen == [[(f"server {i}", False, step) for i in range(2)] for step in range(1, 4)]


@pytest.mark.long
def test_the_degree_of_servers_changes_without_a_start(
    data: Mapping[str, object], forked_servers: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of each degree were started before the first step; those of one are awake, with the newest weights."""
    own: dict[str, object] = {"steps": 3, "parallelism__degree": 2, "parallelism__min_degree": 1}
    monkeypatch.setattr(ParallelismPlanner, "calm", 2)
    own |= {"servers__count": 1, "servers__flags": ("--tp", "{degree}")}
    own["servers__environment"] = ("XLA_FLAGS=--xla_force_host_platform_device_count=2",)
    watch = Watch()
    with FluxTrainer(fleet(tmp_path / "run", data, **own), callbacks=[watch]) as trainer:
        result = trainer.fit()
        assert [engine.stats().tokens_generated > 0 for engine in trainer.engines] == [True, True]
        assert trainer.engine is trainer.engines[0]  # the one that evaluates
    assert result.summary.complete and 0 < result.summary.logprob_gap_max < GAP
    wide, asleep = [("2-device server 0", False)], [(f"1-device server {i}", True) for i in range(2)]
    assert sorted(watch.seen[0]) == sorted([*((*server, 1) for server in wide), *((*server, -1) for server in asleep)])
    for step, seen in enumerate(watch.seen[1:], 2):  # two calm steps: those of one device are awake
        assert sorted(seen) == [("1-device server 0", False, step), ("1-device server 1", False, step),
                                ("2-device server 0", True, -1)]  # fmt: skip
    steps = [record for record in read(tmp_path / "run" / "metrics.jsonl") if record["phase"] == "rl"]
    assert sum(record["servers/restarts"] for record in steps) == 0
