"""Replay: what the buffer chooses, against a model of it; a step with replayed groups is one over all of them; and runs
that are killed go on with the same groups."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_cases import (
    Died,
    DiesAt,
    as_if_killed,
    assert_same_bits,
    assert_same_run,
    flags,
    letters,
    model_arrays,
    summary,
    trained,
)
from shadow_run_cases import media, without_store
from step_cases import VERSION, flat, near_policy, trainer_of
from test_algorithms import group

from fluxjax.base.types import PreparedPrompt
from fluxjax.config import AlgorithmConfig, ImportanceConfig, ReplayConfig, cli
from fluxjax.learner.replay import ReplayBuffer
from fluxjax.report.metrics import read
from models.inputs import ModelInput

NOTHING = ModelInput(np.zeros(1, np.int32), np.zeros((3, 1), np.int32), np.full(1, -1, np.int32), 1)


THIRD_TENTH = tuple(np.array([-1.0 / 3.0, -0.1], np.float32).tolist())  # as a checkpoint has them


def made(draw, version, advantages=(1.0, -1.0)):
    """A group of this draw whose newest token is of this version; its prompt."""
    one = group([0.25 * draw, 1.0 / 3.0], draw)
    samples = []
    for sample, advantage in zip(one.samples, advantages, strict=True):
        parts = {"token_ids": (1, 2), "logprobs": THIRD_TENTH, "versions": (version, version)}
        response = dataclasses.replace(sample.response, **parts, temperature=0.7)
        reward = dataclasses.replace(sample.reward, parts={"exact": 1.0}, reason="because")
        samples.append(dataclasses.replace(sample, response=response, reward=reward, advantage=advantage))
    one = dataclasses.replace(one, samples=tuple(samples))
    return one, PreparedPrompt(one.prompt, NOTHING)


MOST = 6  # groups that a buffer holds


def again(buffer, config):
    """The buffer, written and read as a checkpoint has it."""
    state = json.loads(json.dumps(buffer.state_dict()))
    other = ReplayBuffer(config, MOST)
    prompts = {draw: kept.prepared for draw, kept in buffer._kept.items()}
    assert sorted(prompts) == [saved["draw"] for saved in state["groups"]]
    other.load_state_dict(state, prompts)
    assert other._kept == buffer._kept, "to the last bit"
    return other


settings = st.builds(
    ReplayConfig,
    share=st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.75]),
    max_age=st.integers(1, 5),
)


@given(
    settings, st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6), max_size=12), st.data()
)
def test_the_buffer_keeps_its_bounds(config, steps, data):
    buffer, draw, used, born, size = ReplayBuffer(config, MOST), 0, {}, {}, {}
    kept: set[int] = set()
    for version, step in enumerate(steps):
        if data.draw(st.booleans()):
            buffer = again(buffer, config)
        chosen, prepared = buffer.choose(len(step), version)
        draws = [one.prompt.draw for one in chosen]
        assert draws == sorted(set(draws)) == list(prepared), "each once, with its prompt"
        may = {d for d in kept if version - born[d] <= config.max_age and used[d] < 1}
        wanted = int(np.floor(len(step) * config.share / (1 - config.share) + 1e-9))
        assert set(draws) <= may and len(draws) == min(wanted, len(may))
        if step:
            assert len(draws) / (len(draws) + len(step)) <= config.share + 1e-9
        key = lambda d: (-born[d], -d)  # noqa: E731
        assert not draws or max(map(key, draws)) <= min(map(key, may - set(draws)), default=(np.inf, 0))
        for d in draws:
            used[d] += 1
        new = []
        for lag, advantage in step:
            one = made(draw, max(version - lag, 0), (float(advantage), -0.5 * advantage))
            born[draw], used[draw], size[draw] = max(version - lag, 0), 0, 0.75 * advantage
            new, draw = [*new, one], draw + 1
        buffer.keep([one for one, _ in new], {p.prompt.draw: p for _, p in new}, version + 1)
        there = kept | {one.prompt.draw for one, _ in new if size[one.prompt.draw]}
        kept = {d for d in there if version + 1 - born[d] <= config.max_age and used[d] < 1}
        kept = set(sorted(kept, key=lambda d: (born[d], d))[-MOST:])
        assert set(buffer._kept) == kept and len(buffer) == len(kept) <= MOST


def test_what_can_not_be_prepared_again_is_let_go():
    config = ReplayConfig(share=0.5)
    buffer = ReplayBuffer(config, MOST)
    groups, prompts = zip(*(made(draw, 0) for draw in range(3)), strict=True)
    buffer.keep(groups, {p.prompt.draw: p for p in prompts}, 1)
    buffer.load_state_dict(buffer.state_dict(), {draw: prompts[draw] for draw in (0, 2)})
    assert [one.prompt.draw for one in buffer.choose(9, 1)[0]] == [0, 2]
    buffer.load_state_dict({}, {})
    assert len(buffer) == 0, "of a run that replayed nothing"


def test_ages_are_counted_apart():
    fresh = [made(5, 7)[0], made(6, 9)[0], made(7, 1, (0.0, 0.0))[0]]
    buffer = ReplayBuffer(ReplayConfig(share=0.5))
    got = buffer.metrics(fresh, [made(0, 4)[0], made(1, 5)[0]], 10)
    want = {"replay/share": 0.4, "replay/kept": 0, "replay/age": 5.5, "replay/age_max": 6}
    assert got == want | {"staleness/lag_mean": 2, "staleness/lag_max": 3}
    assert buffer.metrics(fresh, [], 10) == {"replay/share": 0.0, "replay/kept": 0.0}


# --- steps -------------------------------------------------------------------------------------------

CLIPPED = AlgorithmConfig.of("grpo", importance=ImportanceConfig(decay=0.9))


def parts_of(groups, prepared):
    return [(some, {g.prompt.draw: prepared[g.prompt.draw] for g in some}) for some in (groups[:2], groups[2:])]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus_baseline"])
def test_a_step_with_replayed_groups_is_one_over_all_of_them(name):
    cfg = dataclasses.replace(CLIPPED, name=name)
    groups, prepared, _ = near_policy()
    first, second = parts_of(groups, prepared)
    plain, want = trainer_of(cfg)
    plain.train(0, *first)
    whole = plain.train(1, groups, prepared)
    trainer, got = trainer_of(cfg, replay=ReplayBuffer(ReplayConfig(share=0.5, max_age=99)))
    alone = trainer.train(0, *first)
    step = trainer.train(1, *second)
    np.testing.assert_array_equal(flat(got), flat(want))
    assert step.metrics["loss"] == whole.metrics["loss"] and step.metrics["replay/share"] == 0.5
    assert alone.metrics["replay/share"] == 0.0 and alone.metrics["replay/kept"] == 2
    assert [g.prompt.draw for g in step.groups] == [g.prompt.draw for g in second[0]], "reported are the fresh ones"
    assert step.metrics["reward/mean"] == pytest.approx(np.mean([s.reward.value for g in second[0] for s in g.samples]))
    lags = [step.metrics["staleness/lag_mean"], step.metrics["replay/age"]]
    sizes = [sum(s.response.num_tokens for g in some for s in g.samples) for some in (second[0], first[0])]
    assert whole.metrics["staleness/lag_mean"] == pytest.approx(np.average(lags, weights=sizes))
    third = trainer.train(2, *first)
    assert third.metrics["replay/share"] == 0.5, "the second step's, which were not replayed yet"
    assert got.version == VERSION + 3


@pytest.mark.slow
def test_gradients_computed_early_take_replayed_groups_in():
    groups, prepared, _ = near_policy()
    first, second = parts_of(groups, prepared)
    plain, want = trainer_of(CLIPPED, replay=ReplayBuffer(ReplayConfig(share=0.5, max_age=99)))
    trainer, got = trainer_of(CLIPPED, replay=ReplayBuffer(ReplayConfig(share=0.5, max_age=99)))
    for one in (plain, trainer):
        one.train(0, *first)
    plain.train(1, *second)
    [left, right] = second[0]
    trainer.accumulate(1, [left], second[1])
    step = trainer.train(1, [right], second[1])
    assert (step.metrics["stream/groups"], step.metrics["replay/share"]) == (1.0, 0.5)
    assert [g.prompt.draw for g in step.groups] == [left.prompt.draw, right.prompt.draw]
    np.testing.assert_allclose(flat(got), flat(want), rtol=0, atol=2e-6)
    jax.block_until_ready(got.params)


# --- settings ------------------------------------------------------------------------------------------


def test_replay_without_a_correction_is_told():
    shared = "--config.replay.share=0.5"
    [line] = [line for line in cli.remarks(cli.load([shared])) if "importance correction" in line]
    assert line.startswith("warning: replay.share above 0 trains on older versions without an importance correction")
    load = cli.load([shared, "--config.algorithm.importance.kind=truncate", "--config.algorithm.importance.decay=0.9"])
    assert not [line for line in cli.remarks(load) if "importance correction" in line]


# --- runs ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("policy", ["synchronous", "adaptive_async"])
def test_a_run_that_is_killed_replays_the_same(policy, tmp_path):
    """Adaptive runs depend on time: theirs goes on, and keeps its bounds."""
    own = {"steps": 9, "replay__share": 0.5}
    own |= {"algorithm__importance__kind": "truncate", "policy": policy} | letters(tmp_path)
    complete = tmp_path / "complete"
    trained(complete, "configs/text.py:debug", flags(**own))
    resumed = as_if_killed(complete, tmp_path / "resumed", 6)
    trained(resumed, "configs/text.py:debug", flags(**own))
    assert summary(resumed)["resumed_from"] == [6]
    rows = [row for row in read(resumed / "metrics.jsonl") if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows[0]["replay/share"] == 0 and max(row["replay/share"] for row in rows[6:]) > 0.3
    assert all(row["replay/share"] <= 0.5 and row.get("replay/age_max", 0) <= 4 for row in rows)
    assert all(row["replay/kept"] <= 9 for row in rows)
    if policy == "synchronous":
        assert_same_run(resumed, complete)
        assert all(row["staleness/lag_max"] == 0 for row in rows), "replayed tokens are counted apart"
    assert summary(resumed)["samples_trained"] == 9 * 16, "what is replayed is trained on once in the books"


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.turn(0))])
def test_media_are_read_again(processes, commands, tmp_path):
    """Where pixels are fetched they are those that a run has which keeps them: in a process that is killed, and in one
    or two that go on. Two round otherwise than one on some processors: they are compared with two."""
    run, config = tmp_path / "run", "configs/vlm.py"
    own = {"steps": 5, "warm_start__steps": 2, "evaluation__every": 0, "replay__share": 0.5}
    own |= media(tmp_path) | {"sharding__devices": processes, "model__tiny__num_layers": 1}

    def killed_and_resumed(folder, arguments):
        with pytest.raises(Died):
            trained(folder, config, arguments, DiesAt("on_step", 4))
        if processes == 1:
            trained(folder, config, arguments)
        else:
            commands.run(folder, config, arguments, processes=processes)

    with without_store():
        killed_and_resumed(tmp_path / "central", flags(**own))
    killed_and_resumed(run, flags(**own, data__preprocessors=1, data__cache_gib=1e-5))
    assert summary(run)["resumed_from"] == [3]
    assert_same_bits(model_arrays(run), model_arrays(tmp_path / "central"))
    shares = {row["step"]: row["replay/share"] for row in read(run / "metrics.jsonl") if row["phase"] == "rl"}
    assert max(shares[1], shares[2], shares[3]) > 0 < max(shares[4], shares[5]), "few differ"
