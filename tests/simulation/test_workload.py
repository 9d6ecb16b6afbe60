"""Prompts, lengths, rewards, faults and servers of the simulation: distributions, and that names decide everything."""

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.stats

from fluxjax.base.timeline import Timeline
from fluxjax.simulation.clock import Clock
from fluxjax.simulation.faults import FaultPlan, FaultRates, exponential, key, uniform
from fluxjax.simulation.options import Model, SimulateConfig, SimulationConfig
from fluxjax.simulation.reward_stage import Servers
from fluxjax.simulation.simulated_rollout import Rollout
from fluxjax.simulation.workload import Workload, response


def workload(seed: int, most: int = 16_384, **settings: Any) -> Workload:
    return Workload(seed, SimulationConfig(**settings), most)


@pytest.fixture(scope="module")
def step_lengths():
    """[step, prompt, sample], uncapped."""
    work = workload(1, 10**6)
    return np.array([work.samples(draw, 0, 8).lengths for draw in range(10_240)]).reshape(80, 128, 8)


def test_lengths_have_the_published_quantiles(step_lengths):
    assert np.median(step_lengths) == pytest.approx(550, rel=0.03)
    assert np.quantile(step_lengths, 0.75) == pytest.approx(1100, rel=0.03)
    longest = step_lengths.max(axis=(1, 2)) / np.median(step_lengths)
    assert 26 < np.median(longest) < 32
    logs = np.log(step_lengths.reshape(-1, 8))
    assert logs.mean(1).var() - logs.var(1, ddof=1).mean() / 8 == pytest.approx(logs.var() / 2, rel=0.1)


def test_lengths_are_capped_and_names_decide():
    work, again, other = workload(3), workload(3), workload(4)
    eight, ten = work.samples(7, 0, 8), again.samples(7, 0, 10)
    assert eight.lengths == ten.lengths[:8] and eight.correct == ten.correct[:8] and eight.sandbox == ten.sandbox[:8]
    assert work.samples(7, 1, 8).lengths != eight.lengths != other.samples(7, 0, 8).lengths
    short = workload(3, 2048)
    lengths = [length for draw in range(2000) for length in short.samples(draw, 0, 8).lengths]
    assert max(lengths) == 2048 and min(lengths) >= 1


def test_every_epoch_has_every_prompt_once():
    work = workload(0, prompts=50)
    prompts = [work.prompt(draw) for draw in range(100)]
    ids = [prompt.id for prompt in prompts]
    assert sorted(ids[:50]) == sorted(ids[50:]) and len(set(ids)) == 50 and ids[:50] != ids[50:]
    assert [prompt.epoch for prompt in prompts] == [0] * 50 + [1] * 50
    assert {prompt.source for prompt in prompts} == {"math", "code", "judge"}
    assert all(len(prompt.text) == 4 * work.prompt_tokens(prompt.draw) for prompt in prompts)


def test_a_prompt_tells_something_about_its_lengths():
    work = workload(2, prompts=4000)
    text = np.array([len(work.prompt(draw).text) for draw in range(2000)])
    lengths = np.array([np.log(work.samples(draw, 0, 8).lengths).mean() for draw in range(2000)])
    found: Any = scipy.stats.spearmanr(text, lengths)
    assert 0.4 < found.statistic < 0.7
    code, judge = (
        np.mean([lengths[draw] for draw in range(2000) if work.prompt(draw).source == task])
        for task in ("code", "judge")
    )
    assert code > judge + 0.3


def test_rewards_hang_and_groups_lack_variance():
    work = workload(5, tasks=("code",))
    groups = [work.samples(draw, 0, 8) for draw in range(2000)]
    sandbox = np.array([group.sandbox for group in groups])
    assert (sandbox >= 30).mean() == pytest.approx(0.05, abs=0.005)
    assert np.median(sandbox) == pytest.approx(1.0, abs=0.1)
    correct = np.array([group.correct for group in groups])
    assert not (correct & (sandbox >= 30)).any()
    assert 0.4 < correct.mean() < 0.7
    assert 0.15 < np.mean([len(set(group)) == 1 for group in correct.tolist()]) < 0.6
    group = next(group for group in groups if max(group.sandbox) > 30)
    worst = group.sandbox.index(max(group.sandbox))
    assert group.reward(worst).reason == "timed out" and group.reward(worst).value == 0
    right = next(group for group in groups if any(group.correct))
    sample = right.correct.index(True)
    assert right.reward(sample).value == 1.0 and right.reward(sample, limit=1e-3).reason == "timed out"
    assert workload(5, tasks=("math",)).samples(0, 0, 8).sandbox == [0.0] * 8


def test_responses_carry_their_versions():
    made = response("00000001.00/3", 1, 3, ((4, 2), (5, 3)))
    assert made.versions == (4, 4, 5, 5, 5)
    assert len(made.token_ids) == len(made.logprobs) == 5
    assert response("a", 0, 0, ((7, 3000),)).versions == (7,) * 3000
    assert response("a", 0, 0, ((7, 30),)).versions is response("b", 1, 0, ((7, 30),)).versions


def test_no_faults_by_default():
    plan = FaultPlan(FaultRates(), 0)
    assert list(plan.crashes(0)) == list(plan.slow_spells(0)) == []
    assert plan.replies(1, 0, 2) == (0.0,)
    assert plan.sync_delay(1, 0) == 0.0 and not plan.reward_hangs(1, 0, 2)


def test_faults_come_at_their_rates_and_by_seed():
    rates = FaultRates(100.0, 10.0, slow_every=50.0, lost=0.05, doubled=0.1, late=0.05, slow_sync=0.2, reward_hangs=0.1)
    plan, again, other = FaultPlan(rates, 1), FaultPlan(rates, 1), FaultPlan(rates, 2)
    crashes = list(itertools.islice(plan.crashes(3), 2000))
    assert crashes == list(itertools.islice(again.crashes(3), 2000)) != list(itertools.islice(other.crashes(3), 2000))
    assert all(end[0] >= begin[0] + begin[1] for begin, end in itertools.pairwise(crashes))
    assert crashes[-1][0] / 2000 == pytest.approx(110, rel=0.1)
    assert next(plan.crashes(4)) != crashes[0]
    replies = [plan.replies(draw, 0, 0) for draw in range(20_000)]
    assert np.mean([reply == () for reply in replies]) == pytest.approx(0.05, rel=0.15)
    assert np.mean([len(reply) == 2 for reply in replies]) == pytest.approx(0.1, rel=0.15)
    assert np.mean([len(reply) == 1 and reply[0] > 0 for reply in replies]) == pytest.approx(0.05, rel=0.15)
    assert np.mean([plan.sync_delay(v, 0) > 0 for v in range(5000)]) == pytest.approx(0.2, rel=0.15)
    assert np.mean([plan.reward_hangs(d, 0, 0) for d in range(5000)]) == pytest.approx(0.1, rel=0.2)
    for wrong in ({"lost": 0.6, "late": 0.5}, {"crash_every": -1.0}, {"slow_factor": 0.0}):
        with pytest.raises(ValueError):
            SimulateConfig(simulation=SimulationConfig(faults=FaultRates(**wrong))).validate()


def test_draws_are_uniform_and_names_matter():
    values = np.array([uniform(1, draw, 0) for draw in range(20_000)])
    assert np.abs(np.histogram(values, 10, (0.0, 1.0))[0] / 2000 - 1).max() < 0.1
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03
    assert len({key(a, b, c) for a in range(10) for b in range(10) for c in range(10)}) == 1000
    assert np.mean([exponential(3.0, draw) for draw in range(20_000)]) == pytest.approx(3.0, rel=0.03)


def test_servers_queue():
    servers = Servers(2)
    assert [servers.submit(0.0, 3.0), servers.submit(1.0, 1.0), servers.submit(1.0, 1.0)] == [3.0, 2.0, 3.0]
    assert servers.submit(10.0, 1.0) == 11.0


def test_engines_are_cut_anew_and_their_work_counts():
    clock, finished = Clock(), []
    settings = SimulationConfig(model=Model.QWEN_7B, gpus=16, degree=1)
    work, faults = Workload(0, settings, 500), FaultPlan(settings.faults, 0)
    fleet = Rollout(clock, settings, work, faults, finished.append, Timeline())
    assert len(fleet.engines) == 16

    def generate(tokens: int) -> None:
        for index in range(16):
            engine = fleet.engines[index % len(fleet.engines)]
            engine.on_finish = finished.append
            engine.submit(f"r{tokens}.{index}", 0, 100, tokens)
        clock.run()

    generate(500)
    worked, part = fleet.utilisation()
    assert 0 < part < worked == 1
    fleet.engines[3].update(0.0, 2, False)
    clock.run()
    fleet.set_parallelism(4)
    assert [engine.version for engine in fleet.engines] == [0] * 4, "the oldest weights that any had"
    generate(300)
    assert sorted(progress.tokens for progress in finished) == [300] * 16 + [500] * 16
    assert all(progress.segments == ((0, progress.tokens),) for progress in finished if progress.tokens == 300)
    worked, part = fleet.utilisation()
    assert 0 < part < worked == pytest.approx(1.0), "of all engines since the beginning"
    assert fleet.preemptions == 0
    assert len(fleet.engines) == 4
