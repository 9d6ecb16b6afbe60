"""The degree of engines changes during a run: between rounds, and nothing that is learnt changes with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import pytest
from run_cases import flags, letters
from runtime_cases import Run
from scripted_engine import ScriptedEngine

import models
from benchmarks.engine_profile import save
from fluxjax.config import ConfigError, ParallelismConfig
from fluxjax.config.cli import load
from fluxjax.coordinator import CoordinatorError, Synchronous
from fluxjax.coordinator.engine_states import ParallelismPlanner
from fluxjax.coordinator.factory import make_coordinator
from fluxjax.coordinator.messages import SetParallelism
from fluxjax.coordinator.policies.tail_batching import TailBatching
from fluxjax.run.callbacks import Callback
from fluxjax.run.trainer import FluxTrainer
from fluxjax.runtime.engine_pool import EnginePool, deal, engine_count
from models.config import DecoderConfig, TextConfig
from rollout.jax_engine import JaxEngine
from rollout.throughput import Point, Profile, sizes

# --- scripted engines: when the coordinator asks, and what it makes of the answer ----------------


class Preempting(ScriptedEngine):
    preemptions = 0

    def stats(self):
        return dataclasses.replace(super().stats(), preemptions=self.preemptions)


class Changing(Run):
    """Four devices. `counts` are the preemptions of each step."""

    def __init__(self, *counts: int, calm: int = 4, changeable: bool = True, **options) -> None:
        super().__init__(*(Preempting() for _ in range(4)), steps=len(counts), **options)
        planner = ParallelismPlanner(ParallelismConfig(min_degree=1), devices=4)
        planner.calm = calm
        self.coordinator.parallelism = planner
        self.pool = self if changeable else None
        self.asked: list[tuple[int, int]] = []  # steps done, degree
        train = self.trainer.train

        def preempting(step, groups, prepared):
            self.engines[-1].preemptions += counts[step - 1]
            return train(step, groups, prepared)

        self.trainer.train = preempting

    async def set_parallelism(self, degree: int) -> Sequence[ScriptedEngine]:
        assert not any(engine.open_streams for engine in self.engines)
        version = min(engine.version for engine in self.engines)
        self.engines = [Preempting() for _ in range(4 // degree)]
        for engine in self.engines:
            engine.version = version
        self.asked.append((self.coordinator.step, degree))
        return self.engines


@pytest.mark.parametrize("policy", [Synchronous, TailBatching])
def test_the_degree_follows_preemptions_between_rounds(policy):
    counts = (3, 5, 5, 9, 0, 0, 0, 0, 2, 0)
    run = Changing(*counts, policy=policy())
    assert run.go().step == len(counts)
    # The last step's preemptions ask for nothing: there is no other step.
    assert run.asked == [(2, 2), (4, 4), (8, 2), (9, 4)]
    assert [report.metrics["rollout/preemptions"] for report in run.diary.reports] == list(counts)
    assert len(run.engines) == len(run.coordinator.fleet) == 1
    assert run.engines[0].version == len(counts), "the last weights reached the engines that there are"
    draws = [group.prompt.draw for groups in run.trainer.trained for group in groups]
    assert len(set(draws)) == len(draws) == 3 * len(counts)


def test_a_resumed_run_begins_with_the_degree_that_it_had():
    first = Changing(1, 2, 2, checkpoint_every=2)
    first.go()
    assert first.asked == [(2, 2)]
    state = first.checkpointer.saved[2]
    second = Changing(1, 2, 2, 2)
    second.coordinator.load_state_dict(state["coordinator"])
    second.source.position, second.trainer.version = state["source"]["position"], 2
    second.go()
    assert second.asked == [(2, 2)] and second.trainer.version == 4


def test_engines_that_can_not_change_end_the_run():
    with pytest.raises(CoordinatorError, match="these engines can't change"):
        Changing(1, 2, 2, changeable=False).go()


def test_the_books_refuse_a_change_while_something_runs():
    run = Changing(1, 2)
    coordinator = run.coordinator
    coordinator.fleet.publish(0, range(4))
    coordinator._commit(SetParallelism(2))
    with pytest.raises(CoordinatorError, match="requests or instructions are under way"):
        coordinator._commit(SetParallelism(4))


# --- real engines --------------------------------------------------------------------------------

STEPS = 4


class Diary(Callback):
    def __init__(self) -> None:
        self.responses: dict[str, tuple] = {}
        self.engines: list[int] = []

    def on_step(self, trainer: Any, step, groups, metrics) -> None:
        self.engines.append(len(trainer.engines))
        for sample in (sample for group in groups for sample in group.samples):
            self.responses[sample.response.rid] = (sample.response.token_ids, sample.response.logprobs)


def configuration(folder, **settings):
    settings |= {"steps": STEPS, "warm_start__steps": 2, "checkpoint__every": 0, "evaluation__every": 0}
    settings |= letters(folder, count=20)
    return load(["--config=configs/text.py", *flags(**settings)])


@pytest.mark.long
def test_training_goes_on_the_same_while_engines_change(tmp_path, monkeypatch):
    monkeypatch.setattr(ParallelismPlanner, "calm", 2)
    told = {}
    changing = {"rollout__engines": 1, "parallelism__degree": 2, "parallelism__min_degree": 1}
    for name, settings in (("plain", {}), ("changing", changing)):
        told[name] = diary = Diary()
        with FluxTrainer(configuration(tmp_path, run_dir=tmp_path / name, **settings)) as trainer:
            assert trainer.fit(callbacks=[diary]).summary.complete
            if name == "changing":  # another run of the same trainer begins as the first did
                assert trainer.fit(num_steps=STEPS + 1).summary.steps == STEPS + 1
                assert len(trainer.coordinator.fleet) == len(trainer.engines) == 2
    assert told["plain"].engines == [1] * STEPS
    # Embedded engines never preempt: after two calm steps, one engine of two devices is two engines of one. Told of a
    # step is who comes after its weights are published.
    assert told["changing"].engines == [1, 2, 2, 2]
    devices = [engine.devices for engine in trainer.engines if isinstance(engine, JaxEngine)]
    assert devices == [(device,) for device in jax.local_devices()[:2]]
    assert trainer.engines[0].stats().tokens_generated and trainer.engines[1].stats().tokens_generated
    assert trainer.engine is trainer.engines[0]
    plain, changed = told["plain"].responses, told["changing"].responses
    assert len(plain) == STEPS * 16 and plain.keys() == changed.keys()
    for rid, (tokens, logprobs) in plain.items():
        assert changed[rid][0] == tokens
        # the weights differ by the rounding of what was summed in another order
        assert changed[rid][1] == pytest.approx(logprobs, abs=1e-4)


# --- configuration -------------------------------------------------------------------------------


def model(**changes):
    settings: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1} | changes
    return models.create(DecoderConfig("qwen2", TextConfig(**settings, num_heads=2, num_kv_heads=1, head_dim=8)))


@pytest.mark.slow
def test_devices_are_dealt_to_engines(tmp_path):
    config = configuration(tmp_path, rollout__engines=3, parallelism__degree=2, parallelism__min_degree=1)
    devices = jax.local_devices()
    pool = EnginePool(config, model())
    assert [engine.devices for engine in pool.engines] == [tuple(devices[i : i + 2]) for i in (0, 2, 4)]
    assert [len(deal(pool.devices, degree)) for degree in (1, 2, 4)] == [6, 3, 1], "two of six make no engine of four"
    config.rollout.engines = 5
    with pytest.raises(ConfigError, match=r"need 10 devices, but there are 8"):
        EnginePool(config, model())
    asynchronous = configuration(tmp_path, policy="adaptive_async", parallelism__degree=2)
    with pytest.raises(ConfigError, match=r"parallelism.degree is 2, but policy=adaptive_async"):
        EnginePool(asynchronous, model())


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    number: int


@pytest.mark.parametrize(
    ("platform", "engines", "degree", "used", "expected"),
    [("gpu", 0, 1, 0, 8), ("gpu", 0, 2, 0, 4), ("gpu", 0, 4, 6, 1), ("gpu", 3, 2, 0, 3), ("cpu", 0, 1, 0, 1)],
)
def test_all_accelerators_generate(tmp_path, platform, engines, degree, used, expected):
    devices = [Device(platform, number) for number in range(8)]
    settings = {"rollout__engines": engines, "parallelism__degree": degree, "sharding__devices": used}
    assert engine_count(configuration(tmp_path, **settings), devices) == expected


@pytest.mark.medium
def test_a_profile_says_the_degree_at_the_start(tmp_path):
    points = (Point(1, 1, 48, 1.0, 1.0), Point(2, 1, 48, 1.0, 3.0))
    file = tmp_path / "profile.json"
    save(Profile("cpu", 2, sizes(model().config.text), points), file)
    settings = {"rollout__engines": 2, "parallelism__min_degree": 1, "parallelism__profile": file}
    config = configuration(tmp_path, **settings)
    assert make_coordinator(config).parallelism.degree == 2
    assert EnginePool(config, model()).engines[0].devices == (jax.local_devices()[0],), "the coordinator asks for it"
    with pytest.raises(ConfigError, match=r"of another model: .*num_layers 1, not 2"):
        EnginePool(config, model(num_layers=2))
    file.write_text("?")
    with pytest.raises(ConfigError, match=r"parallelism.profile: .*is no profile of version 1: JSONDecodeError"):
        make_coordinator(config)
