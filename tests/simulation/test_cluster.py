"""The real coordinator on a simulated cluster: agrees with a step worked out by hand, repeats itself, loses nothing."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest
from by_hand import roll_out, setup_of, workload
from conftest import ROOT
from histories import History, scenario
from promises import misplaced

from fluxjax import simulate
from fluxjax.base.types import Response
from fluxjax.config import cli
from fluxjax.coordinator import messages
from fluxjax.coordinator.engine_states import ParallelismPlanner
from fluxjax.coordinator.messages import Event, Instruction, PublishWeights, ResponseFinished, RewardReady, Train
from fluxjax.coordinator.policies.rounds import Rounds
from fluxjax.simulation.options import SimulateConfig
from fluxjax.simulation.simulated_run import make_cluster
from fluxjax.simulation.simulated_run import summary as summarise
from fluxjax.simulation.virtual_cluster import Cluster, StuckError


def configuration(*options: str) -> SimulateConfig:
    small = ["rollout.prompts_per_step=16", "rollout.group_size=4", "simulation.gpus=8", "steps=3"]
    chosen = [f"--config.{option}" for option in [*small, *options]]
    return cli.load(["--config=configs/simulation.py:14b", *chosen], SimulateConfig)


class Watched:
    """A run with all that was heard and said."""

    def __init__(self, config: SimulateConfig) -> None:
        self.log: list[tuple[float, Event | Instruction]] = []
        self.cluster: Cluster = make_cluster(config, lambda now, what: self.log.append((now, what)))
        self.cluster.run()

    def all(self, *kinds: type) -> list:
        return [what for _, what in self.log if isinstance(what, kinds)]

    def times(self, *kinds: type) -> list[float]:
        return [now for now, what in self.log if isinstance(what, kinds)]

    def responses(self) -> Sequence[Response]:
        return [s.response for train in self.all(Train) for group in train.groups for s in group.samples]


def test_a_synchronous_step_is_the_one_worked_out_by_hand():
    """With one engine there is nothing to route: the first step takes as long as its parts, one after the other."""
    options = ("simulation.gpus=2", "simulation.rewards=synchronous", "simulation.tasks=('math',)", "steps=1")
    setup, watched = setup_of("14b"), Watched(configuration(*options))
    work = workload(setup, 0, "math")
    seen = watched.cluster.work
    draws = list(range(16))
    assert [work.samples(d, 0, 4).lengths for d in draws] == [seen.samples(d, 0, 4).lengths for d in draws]
    small = dataclasses.replace(setup, gpus=2, responses=4)
    rollout = roll_out(small, work, draws)
    hardware = setup.hardware
    tokens = sum(sum(work.samples(d, 0, 4).lengths) + 4 * work.prompt_tokens(d) for d in draws)
    rewards = 64 * hardware.reward_seconds("math", 1)
    record = watched.cluster.records[0]
    assert record.rollout == pytest.approx(rollout.seconds, rel=1e-9)
    assert record.train == pytest.approx(hardware.train_seconds(tokens, 2), rel=1e-9)
    assert record.seconds == pytest.approx(rollout.seconds + rewards + record.train, rel=1e-9)
    assert watched.cluster.clock.now == pytest.approx(record.seconds + hardware.sync_seconds(), rel=1e-9)


@pytest.mark.parametrize("rewards", ["synchronous", "asynchronous", "scheduled"])
def test_when_rewards_begin(rewards):
    """verl's come after the last response; the others while responses still run, and the scheduler's take less."""
    watched = Watched(configuration(f"simulation.rewards={rewards}", "steps=2"))
    last = max(now for now, what in watched.log if isinstance(what, ResponseFinished) and now < watched.times(Train)[0])
    early = [now for now in watched.times(RewardReady) if now < last]
    assert not early if rewards == "synchronous" else early
    assert len(watched.all(RewardReady)) == 2 * 64


def test_the_scheduler_stops_sandboxes_sooner():
    def seconds(rewards: str) -> float:
        options = ("simulation.tasks=('code',)", f"simulation.rewards={rewards}", "policy=tail_batching")
        return Watched(configuration(*options)).cluster.records[-1].end

    assert seconds("scheduled") < seconds("asynchronous") - 30 < seconds("synchronous") - 30


@pytest.mark.parametrize(
    ("policy", "train_gpus"),
    [("synchronous", 0), ("synchronous", 4), ("tail_batching", 0), ("april", 4), ("adaptive_async", 0)],
)
def test_every_policy_runs_and_loses_nothing(policy, train_gpus):
    watched = Watched(configuration(f"policy={policy}", f"simulation.train_gpus={train_gpus}", "steps=6"))
    ledger = watched.cluster.coordinator.ledger
    trained = [group.prompt.draw for train in watched.all(Train) for group in train.groups]
    assert Counter(trained + [s.draw for s in ledger.skipped] + list(ledger.entries)) == Counter(range(ledger.drawn))
    assert len(watched.cluster.records) == 6 and ledger.trained == 6 * 16
    used = watched.cluster.utilisation()
    assert 0 < used["throughput"] < used["busy"] <= 1


def test_training_takes_the_gpus_away_unless_it_has_its_own():
    """While engines and trainer take turns, no response ends during training."""

    def during(train_gpus: int) -> int:
        options = ("policy=adaptive_async", f"simulation.train_gpus={train_gpus}", "steps=6")
        watched = Watched(configuration(*options))
        spans = [(record.end - record.train, record.end) for record in watched.cluster.records]
        ends = watched.times(ResponseFinished)
        return sum(begin < end < over for end in ends for begin, over in spans)

    assert during(0) == 0 < during(4)


def test_responses_go_on_under_new_weights():
    """Partial responses keep their tokens with their versions, and have the length that they were begun with."""
    watched = Watched(configuration("policy=april", "steps=8"))
    mixed = [one for one in watched.responses() if len(set(one.versions)) > 1]
    assert mixed and all(list(one.versions) == sorted(one.versions) for one in mixed)
    work = watched.cluster.work
    for one in mixed:
        assert len(one.token_ids) == work.samples(one.draw, 0, 4).lengths[one.sample]


def test_lent_engines_train_and_wake():
    options = ("policy=tail_batching", "policy.max_staleness=0", "simulation.rewards=scheduled", "steps=5")
    watched, plain = Watched(configuration(*options, "stream_trainer=True")), Watched(configuration(*options))
    policy = watched.cluster.coordinator.policy
    assert isinstance(policy, Rounds) and policy.stream is not None and policy.stream.lent > 0
    assert watched.cluster.coordinator.ledger.trained == plain.cluster.coordinator.ledger.trained == 80


def test_training_begins_before_a_batch_is_complete():
    """With GPUs of its own the trainer begins when the rest is predicted to end in time: the run is shorter for it."""
    options = ("simulation.train_gpus=4", "steps=5")
    early = Watched(configuration(*options, "speculative_sync=0.5"))
    plain = Watched(configuration(*options))
    assert early.all(messages.Accumulate) and not plain.all(messages.Accumulate)
    assert early.cluster.coordinator.ledger.trained == plain.cluster.coordinator.ledger.trained == 80
    assert early.cluster.clock.now < plain.cluster.clock.now


def test_engines_change_their_degree(monkeypatch):
    """Without a preemption the planner halves the degree: twice as many engines on the same GPUs."""
    monkeypatch.setattr(ParallelismPlanner, "calm", 2)
    watched = Watched(configuration("parallelism.min_degree=1", "steps=4"))
    assert [(order.degree, order.engines) for order in watched.all(messages.ParallelismSet)] == [(1, 8)]
    assert watched.cluster.coordinator.ledger.trained == 64
    assert {r.engine for order in watched.all(messages.Generate)[-1:] for r in order.requests} == set(range(8))


@pytest.mark.slow
def test_same_seed_same_trace():
    one, other = Watched(configuration("policy=april")), Watched(configuration("policy=april"))
    assert one.log == other.log
    assert Watched(configuration("policy=april", "seed=1")).log != one.log


@pytest.mark.parametrize("crash_every", [0.0, 1e4])  # crashes alone would keep the clock going for ever
def test_a_run_that_can_not_go_on_says_so(crash_every, monkeypatch):
    cluster = make_cluster(configuration(f"simulation.faults.crash_every={crash_every}"))
    monkeypatch.setattr(cluster.scoring, "score", lambda *what: None)  # rewards never come
    with pytest.raises(StuckError, match=r"step 1: nothing has happened since .* s, and the coordinator awaits resp"):
        cluster.run()
    assert summarise(cluster, 0.0)["steps"] == 0


def histories(first: int, count: int) -> dict:
    command = [sys.executable, "-m", "tests.histories", "--json", f"--first-seed={first}", f"--seeds={count}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout)


class TestFaultHistories:
    """What must hold, whatever goes wrong: `tests/histories.py`."""

    @pytest.mark.long
    def test_nothing_goes_wrong(self):
        """In a process of its own, where types are not checked at every call; the first 120 seeds are those of
        `test_promised_histories.py`."""
        result = histories(120, 160)
        assert result["failed"] == [] and result["histories"] == 160 and result["crashes"] > 40
        assert min(result["by_policy"].values()) == 40

    def test_what_they_found_before(self):
        """A response that is aborted at the very moment of its last token."""
        assert History(scenario(7022)).run() == ""

    @pytest.mark.long
    def test_same_seed_same_trace(self):
        one, other = histories(1000, 4), histories(1000, 4)
        assert one["trace"] == other["trace"] != histories(2000, 4)["trace"]

    def test_a_wrong_version_is_noticed(self):
        history = History(scenario(0))
        assert history.run() == ""
        history.promises.books.version += 9
        history.promises._learns(history.groups[:1])
        assert "of versions [0] is trained on" in history.promises.wrong[0]

    def test_a_group_trained_on_twice_is_noticed(self):
        history = History(scenario(0))
        assert history.run() == ""
        draws = [group.prompt.draw for group in history.groups]
        assert misplaced(history.cluster.coordinator, [*draws, draws[0]]) == {draws[0]: 1}

    def test_versions_are_served_in_order(self):
        history = History(scenario(2))
        history._watch(0.0, messages.Started(3))
        history._watch(0.0, PublishWeights(3, (0,)))
        assert not any("published" in wrong for wrong in history.promises.wrong)
        history._watch(0.0, PublishWeights(2, (0,)))
        assert "step 1: version 2 is published" in history.promises.wrong


class TestCommand:
    @pytest.mark.medium
    def test_summary_and_gantt(self, tmp_path, capsys):
        small = ["--config.rollout.prompts_per_step=8", "--config.rollout.group_size=2", "--config.steps=2"]
        assert simulate.main([*small, "--gantt", str(tmp_path / "gantt.png")]) == 0
        shown = capsys.readouterr().out
        assert "synchronous, 14b on 32 simulated GPUs" in shown and "GPUs busy" in shown
        assert (tmp_path / "gantt.png").read_bytes()[:4] == b"\x89PNG"
        assert simulate.main([*small, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["steps"] == 2 and result["prompts"]["trained"] == 16

    def test_planner_that_may_halve_too_far(self, capsys):
        with pytest.raises(SystemExit):
            simulate.main(["--config=configs/simulation.py:32b", "--config.parallelism.min_degree=1"])
        assert "parallelism.min_degree is 1; qwen2.5-32b does not fit on 1 GPUs" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argument", "expected"),
        [
            ("--config.simulation.gpu=3", "did you mean --config.simulation.gpus?"),
            ("--config.simulation.degree=3", "simulation.degree is 3; it must divide the 8 GPUs of a host"),
            ("--config.simulation.train_gpus=32", "none is left for engines"),
            ("--config.simulation.tasks=('maths',)", "it must have some of math, code, judge"),
            ("--config.simulation.faults.lost=1.5", "simulation.faults.lost"),
            ("--config.simulation.faults.down=-1.0", "simulation.faults.down is -1.0"),
            ("--config.rollout.max_new_tokens=1000000", "the cache of an engine of 2 GPUs holds"),
            ("--config.optim.lr=1", "optim was set, but nothing of a simulation depends on it"),
            ("--config.rollout.engines=3", "simulation.gpus and simulation.degree make 16"),
            ("--config.rollout.temperature=nonsense", "rollout.temperature"),
            ("--config=configs/vlm.py", "must return a fluxjax.simulation.options.SimulateConfig"),
            ("--config=configs/simulation.py:8b", "not '8b'"),
        ],
    )
    def test_mistakes_end_in_one_line(self, argument, expected, capsys):
        try:
            status = simulate.main([argument])
        except SystemExit as error:
            status = error.code
        error = capsys.readouterr().err
        assert status == 2 and expected in error and error.count("\n") == 1

    def test_help_is_quick_and_complete(self):
        command = [sys.executable, "-X", "importtime", "-m", "fluxjax.simulate", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert "--config.simulation.rewards=asynchronous" in done.stdout and "--config.optim" not in done.stdout
        assert "| jax\n" not in done.stderr.replace("  ", "")
