"""Real runs whose responses are judged by a server: one of `rollout.serve`, and one that dies in the middle."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from forked import forked
from run_cases import ROOT, Diary, flags, letters

import models
from fluxjax.config import Config, RewardTerm, SourceConfig
from fluxjax.config.cli import load
from fluxjax.report.metrics import read
from fluxjax.run.trainer import FluxTrainer
from models.config import DecoderConfig, TextConfig
from models.processing import tiny

pytestmark = pytest.mark.slow

STEPS = 2
CHARACTERS = "0123456789abcdefimnoprst F:<>/-_\n"
RUBRIC = "{response}\n:"


def configuration(folder: pathlib.Path, arguments: dict[str, object], seconds: float = 60.0, **more: object) -> Config:
    data = letters(folder, count=60)
    settings = {"steps": STEPS, "warm_start__steps": 1, "checkpoint__every": 0, "evaluation__every": 0}
    settings |= {"evaluation__samples": 2} | more
    config = load(["--config=configs/text.py", f"--config.run_dir={folder / 'run'}", *flags(**settings)])
    path, held_out = (str(data[f"data__sources__reverse__{name}"]) for name in ("path", "eval_path"))
    terms = {"positions": RewardTerm(weight="0.5"), "judge": RewardTerm(arguments=arguments)}
    config.data.sources = {"words": SourceConfig(path, held_out, rewards=terms, eval_reward="positions")}
    config.rewards.kinds["judge"] = dataclasses.replace(config.rewards.kinds["judge"], seconds=seconds)
    return config


class Kills(Diary):
    """Kills a process after the first step."""

    def __init__(self, process: subprocess.Popen) -> None:
        super().__init__()
        self.process = process

    def on_step(self, trainer, step, groups, metrics) -> None:
        super().on_step(trainer, step, groups, metrics)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def listening(*words: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of a server, and its process."""
    command, env = [sys.executable, *words], os.environ | {"PYTHONPATH": str(ROOT)}
    with forked(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            assert line[:2] == ["listening", "on"], line
            yield line[2], process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny judge: what it answers is arbitrary, and has digits."""
    folder = tmp_path_factory.mktemp("judge")
    processor = tiny.build([CHARACTERS])
    vocabulary = processor.tokenizer.get_vocab_size()
    sizes: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "tie_word_embeddings": True}
    models.save(models.create(DecoderConfig("qwen2", TextConfig(vocabulary, 16, 16, head_dim=8, **sizes)), 0), folder)
    processor.save(folder)
    (folder / "rubric.txt").write_text(RUBRIC)
    return folder


@pytest.mark.long
def test_a_run_judged_by_a_rollout_server(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """And its first step once more, with the same verdicts: they depend on what is asked only."""
    flags = ("--model", str(checkpoint), "--slots", "8", "--max-sequence-tokens", "256")
    judge = {"api": "generate", "tokenizer": str(checkpoint), "rubric": str(checkpoint / "rubric.txt")}
    judge |= {"pattern": "([0-9])", "scale": "0 to 9", "temperature": 1.0}
    judge |= {"max_tokens": 150, "retries": 20, "request_seconds": 250.0}
    values = []
    with listening("-m", "rollout.serve", *flags) as (address, _):
        for name, steps in (("one", STEPS), ("other", 1)):
            (tmp_path / name).mkdir()
            diary = Diary()
            config = configuration(tmp_path / name, {"server": address, **judge}, 300.0, steps=steps)
            with FluxTrainer(config) as trainer:
                result = trainer.fit(callbacks=[diary])
            assert result.summary.complete and not result.summary.rewards_failed
            samples = diary.samples
            assert len(samples) == steps * 4 * 4
            for sample in samples:
                parts = sample.reward.parts
                assert sample.reward.value == pytest.approx(0.5 * parts["positions"] + parts["judge"])
            values.append({(s.response.rid, s.response.token_ids, s.reward.parts["judge"]) for s in samples})
            records = [r for r in read(tmp_path / name / "run" / "metrics.jsonl") if r["phase"] == "rl"]
            answers, unparsed = (sum(r[f"rewards/judge/{count}"] for r in records) for count in ("answers", "unparsed"))
            assert answers - unparsed == len(samples) and all("rewards/busy/judge" in r for r in records)
    assert values[1] < values[0] and len({value for *_, value in values[0]}) > 2


@pytest.mark.slow
def test_a_judge_that_dies_in_the_middle(tmp_path: pathlib.Path) -> None:
    """All that it can't judge any more is a scored 0; `test_misbehaving_rewards` has runs that end for it."""
    with listening(str(ROOT / "tests" / "rewards" / "judge_server.py"), "0") as (address, process):
        config = configuration(tmp_path, {"server": address}, 4.0)
        config.rewards.max_failed = 1.0
        diary = Kills(process)
        with FluxTrainer(config) as trainer:
            assert trainer.fit(callbacks=[diary]).summary.complete
    first, last = ([sample.reward for sample in samples] for samples in (diary.samples[:16], diary.samples[-16:]))
    assert not any(reward.reason for reward in first)
    unjudged = [reward.reason.startswith(f"judge: {address}") and reward.parts["judge"] == 0 for reward in last]
    assert all(unjudged), last
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (reason,) = summary["rewards_failed"]["words"]
    assert reason.startswith(f"judge: {address}/v1/chat/completions: ClientConnectorError: Cannot connect to host")
    assert summary["rewards_failed"]["words"][reason] >= len(last)
