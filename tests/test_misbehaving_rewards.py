"""Rewards that hang, raise, crash, answer nonsense or allocate without end, in real runs under each policy: no sample
is lost, the run ends as it should, and its summary names them."""

from __future__ import annotations

import json
import pathlib

import misbehaving_rewards
import pytest
from run_cases import POLICIES, Diary, flags, letters

from fluxjax.config import POLICIES as KINDS
from fluxjax.config import RewardKindConfig, RewardTerm, SourceConfig
from fluxjax.config.cli import load
from fluxjax.coordinator.ledger import RunGivenUp
from fluxjax.report.metrics import read
from fluxjax.rewards import calls
from fluxjax.run.trainer import FluxTrainer

pytestmark = pytest.mark.slow

STEPS = 3
FAILURES = {  # by reward: how the reasons in the summary begin, and the way that metrics count
    "hangs": ("timed out after 0.5 s", "timed_out"),
    "raises": ("KeyError: 'nothing here'", "raised"),
    "answers_nan": ("returned nan", "invalid"),
    "allocates": ("needs more than 0.1 GiB of memory", "died"),
    "crashes": ("ended its process (signal 11)", "died"),
    "exits": ("SystemExit: 3", "raised"),
    "blocks": ("timed out after 0.5 s", "timed_out"),
    "refuses_to_end": ("timed out after 0.5 s", "timed_out"),
    "AnswersTwice": ("returned ", "invalid"),
}
TRIED = {  # by policy: each reward once, each way under rounds and without
    "synchronous": ("hangs", "raises", "allocates", "answers_nan"),
    "tail_batching": ("blocks", "exits"),
    "april": ("refuses_to_end", "AnswersTwice"),
    "adaptive_async": ("hangs", "raises", "crashes", "AnswersTwice"),
}


def configuration(folder: pathlib.Path, policy: str, rewards: dict[str, str], **more: object):
    data = letters(folder, count=60)
    settings = {"steps": STEPS, "policy": policy, "rollout__engines": 2, "warm_start__steps": 1}
    settings |= {"checkpoint__every": 0, "evaluation__every": 0, "evaluation__samples": 1, "rollout__group_size": 2}
    settings |= {"rollout__prompts_per_step": len(rewards)} | POLICIES[policy] | more
    config = load(["--config=configs/text.py", f"--config.run_dir={folder / 'run'}", *flags(**settings)])
    path, held_out = (str(data[f"data__sources__reverse__{name}"]) for name in ("path", "eval_path"))
    config.data.sources = {name: SourceConfig(path, held_out, reward=reward) for name, reward in rewards.items()}
    kinds = {kind: RewardKindConfig(60.0, 1) for kind in ("function", "batch")}
    config.rewards.kinds = kinds | {"hanging": RewardKindConfig(0.5)}  # eight at a time
    return config


def misbehaving(*names: str) -> dict[str, str]:
    return {name: f"misbehaving_rewards:{name}" for name in names}


def workers() -> list[str]:
    """The processes that score for this one."""
    children = [pid for file in pathlib.Path("/proc/self/task").glob("*/children") for pid in read_alive(file).split()]
    lines = [read_alive(pathlib.Path(f"/proc/{pid}/cmdline")) for pid in children]
    return [line for line in lines if "fluxjax.base.worker_process" in line]


def read_alive(file: pathlib.Path) -> str:
    """What /proc says of a thread or a process, which may end meanwhile."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_every_policy_and_every_failure_is_tested():
    assert set(POLICIES) == set(TRIED) == set(KINDS)
    assert {name for names in TRIED.values() for name in names} == set(FAILURES)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.long
def test_rewards_that_go_wrong(policy: str, tmp_path: pathlib.Path, capsys, monkeypatch) -> None:
    """The run is stopped after a step, and goes on from there."""
    monkeypatch.setattr(calls, "MEMORY_GIB", 0.1)
    failing = {name: FAILURES[name] for name in TRIED[policy]}
    rewards = misbehaving(*failing, "forks") | {"good": "positions"}
    diaries = Diary(stop_after=1), Diary()
    for diary in diaries:
        with FluxTrainer(configuration(tmp_path, policy, rewards)) as trainer:
            result = trainer.fit(callbacks=[diary])
            ledger = trainer.coordinator.ledger
        assert not workers(), "processes of rewards outlive the run"
    assert result.summary.complete and result.summary.steps == STEPS
    groups = [group for diary in diaries for groups in diary.groups.values() for group in groups]
    draws = {group.prompt.draw for group in groups}
    assert len(draws) == len(groups) == STEPS * len(rewards)
    assert draws | set(ledger.entries) == set(range(ledger.last_draw + 1)), "no prompt is lost"

    trained = {name: [s.reward for g in groups if g.prompt.source == name for s in g.samples] for name in rewards}
    for name, (reason, _) in failing.items():
        assert trained[name] and all(r.value == 0 and r.reason.startswith(reason) for r in trained[name]), name
        named = result.summary.rewards_failed[name]
        assert all(text.startswith(f"misbehaving_rewards:{name}: {reason}") for text in named), named
        assert sum(named.values()) >= len(trained[name])
    assert not any(reward.reason for name in ("forks", "good") for reward in trained[name])
    assert result.summary.rewards_failed.keys() == failing.keys()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rewards_failed"].keys() == failing.keys()
    if "hangs" in failing:
        said = "failed rewards of source hangs, each scored 0: misbehaving_rewards:hangs: timed out after 0.5 s ("
        assert said in capsys.readouterr().out

    records = [record for record in read(tmp_path / "run" / "metrics.jsonl") if record["phase"] == "rl"]
    for name in ("scored", "open", "waiting", "seconds_median", "seconds_p95", "seconds_max", "busy/function"):
        assert any(f"rewards/{name}" in record for record in records), name
    for way in {way for _, way in failing.values()}:
        assert sum(record.get(f"rewards/failed/{way}", 0) for record in records) > 0, way


@pytest.mark.slow
def test_a_run_whose_reward_fails_too_often_stops_with_a_checkpoint(tmp_path: pathlib.Path) -> None:
    config = configuration(tmp_path, "synchronous", misbehaving("raises"), steps=50, rollout__prompts_per_step=20)
    with FluxTrainer(config) as trainer, pytest.raises(RunGivenUp) as caught:
        trainer.fit()
    said = "reward 'misbehaving_rewards:raises' of data.sources.raises failed on 100% of the last 100 responses, more "
    assert str(caught.value).startswith(f"{said}than rewards.max_failed = 0.5; most often: KeyError")
    assert "\n" not in str(caught.value)
    config.data.sources["raises"].reward, config.steps = "positions", trainer.coordinator.step + 1
    with FluxTrainer(config) as trainer:  # mended
        result = trainer.fit()
    assert result.summary.complete and result.summary.resumed_from == [config.steps - 1] != [0]


@pytest.mark.slow
def test_a_mixture_by_object_changes_its_weights_and_is_resumed(tmp_path: pathlib.Path) -> None:
    """Responses that wait for a slow reward when the run is stopped are scored when it goes on."""
    config = configuration(tmp_path, "adaptive_async", misbehaving("slow"), rollout__prompts_per_step=4)
    terms = {"positions": RewardTerm(weight="linear(1, 0)"), "slow": RewardTerm("misbehaving_rewards:slow", "2")}
    source = config.data.sources["slow"]
    config.data.sources = {"s": SourceConfig(source.path, source.eval_path, rewards=terms)}
    diaries = Diary(stop_after=1), Diary()
    for diary in diaries:
        with FluxTrainer(config, rewards={"s": {"slow": misbehaving_rewards.slow}}) as trainer:
            result = trainer.fit(callbacks=[diary])
    assert result.summary.complete and not result.summary.rewards_failed
    samples = [sample for diary in diaries for sample in diary.samples]
    assert len(samples) == STEPS * 4 * 2
    shares = {(s.reward.value - 2 * s.reward.parts["slow"]) / (s.reward.parts["positions"] or 1) for s in samples}
    assert shares <= {0.0, 0.5, 1.0} and len(shares) > 1
