"""Reading the metrics of a run, writing its samples down, and `summary.json` at its end, written atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..base.process import activity, compilations, working_time
from ..base.types import Group
from ..config.run_folder import replace_text


def read(file: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics file, in order, up to a line that a kill has cut off."""
    records = []
    with contextlib.suppress(json.JSONDecodeError):
        for line in file.read_text().splitlines() if file.exists() else ():
            records.append(json.loads(line))
    return records


def dump_samples(
    folder: pathlib.Path, step: int, groups: Sequence[Group], decode: Callable[[Sequence[int]], str], count: int
) -> None:
    """Writes `count` responses of `step` to `folder/<step>.jsonl`: one of each group in turn, so that all sources show
    up."""
    folder.mkdir(exist_ok=True)
    most = max(len(group.samples) for group in groups)
    turns = [(g, g.samples[turn]) for turn in range(most) for g in groups if turn < len(g.samples)]
    with (folder / f"{step:06d}.jsonl").open("w") as file:
        for group, sample in turns[:count]:
            record = {
                "step": step,
                "source": group.prompt.source,
                "id": group.prompt.id,
                "prompt": group.prompt.text,
                "media": [item.name for item in group.prompt.media],
                "answer": group.prompt.answer,
                "response": decode(sample.response.token_ids),
                "finish": sample.response.finish,
                "reward": round(sample.reward.value, 4),
                "reason": sample.reward.reason,
                "parts": {name: round(value, 4) for name, value in sample.reward.parts.items()},
                "advantage": round(sample.advantage, 4),
                "logprob": round(sum(sample.response.logprobs), 4),
                "versions": sorted(set(sample.response.versions)),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


FILE = "summary.json"


@dataclasses.dataclass
class Summary:
    """The results of a run. Accuracies are those of greedy answers to held-out prompts, in [0, 1], one for each source.

    Every checkpoint holds it, so that a resumed run reports the whole run.
    """

    name: str = ""
    complete: bool = False  # False: the run was stopped early and can be resumed
    seed: int = 0
    parameters: int = 0  # of the model, a count
    devices: int = 0
    steps: int = 0  # RL steps done
    accuracy: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # source -> start, end
    blind: dict[str, float] = dataclasses.field(default_factory=dict)  # of the final model, every pixel blanked
    chance: dict[str, float] = dataclasses.field(default_factory=dict)  # of the best constant answer
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # wall time of each stage, and `total`
    logprob_gap_max: float = 0.0  # over steps, of the mean absolute gap of a step
    logprob_gap_alarms: int = 0  # steps whose gap was alarming (`fluxjax.run.callbacks.GAP_ALARMS`)
    samples_trained: int = 0  # responses
    tokens_trained: int = 0  # response tokens
    samples_skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # reason -> prompts, of all phases
    rewards_failed: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)  # source -> reason -> responses
    steps_not_finite: int = 0  # steps whose gradients were not finite: they changed nothing
    checkpoints_failed: int = 0
    resumed_from: list[int] = dataclasses.field(default_factory=list)  # steps

    def add_seconds(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def count_skip(self, reason: str) -> None:
        """Counts a prompt that could not be used."""
        self.samples_skipped[reason] = self.samples_skipped.get(reason, 0) + 1

    def count_failed_reward(self, source: str, reason: str) -> None:
        """Counts a response that a reward failed on. The dictionaries are replaced, because a thread may write them to
        a checkpoint meanwhile."""
        reasons = self.rewards_failed.get(source, {})
        self.rewards_failed = {**self.rewards_failed, source: {**reasons, reason: reasons.get(reason, 0) + 1}}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of its body to the stage, but that of compilations to the stage `compile`."""
        started, compiled = working_time(), compilations().seconds
        try:
            with activity(name.replace("_", " ")):
                yield
        finally:
            self.add_seconds(name, working_time() - started)
            self.add_seconds("compile", compilations().seconds - compiled)

    def write(self, run_dir: pathlib.Path) -> pathlib.Path:
        file = run_dir / FILE
        values = dataclasses.asdict(self)
        values["seconds"] = {stage: round(seconds, 2) for stage, seconds in self.seconds.items()}
        replace_text(file, json.dumps(values, indent=2) + "\n")
        return file

    def state_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Summary:
        return cls(**state)


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """The result of `fit`: the summary, which is also in `run_dir/summary.json`, and the run's folder."""

    summary: Summary
    run_dir: pathlib.Path

    @property
    def model_dir(self) -> pathlib.Path:
        """The trained model as a Hugging Face folder, with its tokenizer and preprocessor settings."""
        return self.run_dir / "model"


def tag(phase: str, name: str) -> str:
    """Returns the name of a metric where phases are not apart."""
    return name if phase == "rl" else f"{phase}/{name}"
