"""The machine-readable end of a run: `summary.json`, written atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from ..config.run_folder import replace_text

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
    logprob_gap_alarms: int = 0  # steps whose gap exceeded `report.logprob_gap_alarm`
    samples_trained: int = 0  # responses
    tokens_trained: int = 0  # response tokens
    samples_skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # reason -> prompts, of all phases
    steps_not_finite: int = 0  # steps whose gradients were not finite: they changed nothing
    checkpoints_failed: int = 0
    resumed_from: list[int] = dataclasses.field(default_factory=list)  # steps

    def add_seconds(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def count_skip(self, reason: str) -> None:
        """Counts a prompt that could not be used."""
        self.samples_skipped[reason] = self.samples_skipped.get(reason, 0) + 1

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of its body to the stage."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.add_seconds(name, time.monotonic() - started)

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
    """What `fit` returns: the summary, which is also in `run_dir/summary.json`, and the run's folder."""

    summary: Summary
    run_dir: pathlib.Path

    @property
    def model_dir(self) -> pathlib.Path:
        """The trained model as a Hugging Face folder, with its tokenizer and preprocessor settings."""
        return self.run_dir / "model"
