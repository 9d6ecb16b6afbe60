"""Whole runs whose reward is broken: they end by themselves, or when asked, and go on once it is mended."""

import json

import pytest
from run_cases import checkpoint_steps, flags, letters, summary

from fluxjax.config.cli import load
from fluxjax.rewards import scorer
from fluxjax.run.callbacks import Callback
from fluxjax.run.main import main
from fluxjax.run.trainer import FluxTrainer

RULE = """
from fluxjax.rewards.rules import exact

broken, calls, watch = True, 0, lambda calls: None

def score(prompt, text):
    global calls
    calls += 1
    watch(calls)
    return 0.0 if broken else len(text) + exact(prompt, text).value
"""


@pytest.fixture
def rule(tmp_path, monkeypatch):
    """A user's own reward, which gives 0 to everything until it is mended."""
    (tmp_path / "own_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "own_rule", raising=False)
    import own_rule  # pyright: ignore[reportMissingImports]

    return own_rule


def configuration(folder, policy: str, **own: object):
    settings = {"steps": 8, "warm_start__steps": 0, "checkpoint__every": 0, "evaluation__every": 0}
    settings |= {"policy": policy, "rollout__dynamic_sampling": True, "run_dir": folder / "run"}
    settings |= {"data__sources__reverse__reward": "own_rule:score"} | letters(folder) | own
    return load(["--config=configs/text.py", *flags(**settings)])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["synchronous", "april"])
def test_a_broken_reward_ends_the_run_in_one_line(policy, rule, tmp_path, capsys) -> None:
    assert main(configuration(tmp_path, policy, rollout__max_num_gen_batches=3)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = "error: dynamic sampling dropped 9 groups of equal rewards (rollout.dynamic_sampling is correct)"
    assert line.startswith(said) and "for step 1, which needs 4 groups of different rewards" in line
    assert "source 'reverse', reward own_rule:score, has 0 (9)" in line and "rollout.max_num_gen_batches" in line


class BreaksAfter(Callback):
    """The reward breaks after the first step, and the run is asked to stop when it gave its 100th 0."""

    def __init__(self, rule) -> None:
        self.rule = rule

    def on_step(self, trainer, step, groups, metrics) -> None:
        last = self.rule.calls + 100
        self.rule.broken = True
        self.rule.watch = lambda calls: trainer.stop() if calls == last else None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tail_batching", "adaptive_async"])
def test_a_stop_is_heard_while_nothing_can_be_learnt(policy, rule, tmp_path, monkeypatch) -> None:
    """Without any bound. What was dropped is in the checkpoint; once the reward is mended, the same command goes on."""
    rule.broken = False
    monkeypatch.setattr(scorer, "_HERE", ("function",))  # the test watches the rule, and mends it
    own = {"rollout__dynamic_sampling": "value", "rollout__max_num_gen_batches": 0}
    config = configuration(tmp_path, policy, **own)
    with FluxTrainer(config) as trainer:
        trainer.fit(callbacks=[BreaksAfter(rule)])
        drawn = trainer.coordinator.ledger.drawn
    steps = trainer.coordinator.step
    assert 1 <= steps < 8 and not summary(tmp_path / "run")["complete"]
    assert drawn < 120, "100 responses make 25 groups; many more would have been drawn after the stop"
    assert checkpoint_steps(tmp_path / "run") == [steps]
    rule.broken = False
    with FluxTrainer(config) as trainer:
        trainer.load_checkpoint()
        ledger = trainer.coordinator.ledger
        assert 0 < ledger.dropped.total() <= ledger.dropped_in_a_row < 40
        assert trainer.fit().summary.complete
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["groups/zero_variance"] for one in metrics if "groups/zero_variance" in one] == [0.0] * 8
