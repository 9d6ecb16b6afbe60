"""Tiny runs of the real command line: own data, processes that are killed, and what two runs must have in common."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import av
import jax
import numpy as np
import orbax.checkpoint as ocp
from forked import forked
from PIL import Image
from safetensors.numpy import load_file

from fluxjax.base.types import Group, Sample
from fluxjax.config.cli import load
from fluxjax.report.metrics import TrainingResult, read
from fluxjax.run.callbacks import Callback
from fluxjax.run.trainer import FluxTrainer

ROOT = pathlib.Path(__file__).resolve().parent.parent

SMALL = """
    model.tiny.hidden_size=16 model.tiny.intermediate_size=32 model.tiny.num_layers=2
    model.tiny.num_heads=2 model.tiny.num_kv_heads=1
    model.tiny.vision_hidden_size=16 model.tiny.vision_intermediate_size=16
    model.tiny.vision_num_heads=2 model.tiny.mrope_section=(1,1,2)
    warm_start.steps=20 warm_start.batch_size=8 warm_start.lr=2e-2 optim.lr=5e-3
    rollout.prompts_per_step=4 rollout.group_size=4 rollout.max_new_tokens=4 rollout.max_sequence_tokens=48
    rollout.slots=16 packing.tokens_per_row=64 packing.rows_per_device=8 packing.patches_per_device=256
    algorithm.entropy_coefficient=0.01 evaluation.samples=4 evaluation.every=3
    checkpoint.every=3 checkpoint.keep=2 report.dump_samples_every=4 sharding.devices=1
"""


def flags(**own: object) -> list[str]:
    """Command-line flags of `SMALL`, then `own` with `__` for a dot."""
    small = [f"--config.{setting}" for setting in SMALL.split()]
    return small + [f"--config.{name.replace('__', '.')}={value}" for name, value in own.items()]


def flags_beside(model: pathlib.Path, **own: object) -> list[str]:
    """The same for a run that begins with this model, which has sizes of its own, and not with a warm start."""
    settings = [flag for flag in flags(warm_start__steps=0, **own) if not flag.startswith("--config.model.")]
    return [*settings, f"--config.model.path={model}"]


# --- data ---------------------------------------------------------------------------------------


def write_jsonl(file: pathlib.Path, records: list[dict]) -> pathlib.Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def letters(folder: pathlib.Path, count: int = 12, long: str = "") -> dict[str, object]:
    """A text task for `configs/text.py`: `count` training records (3 steps of 4 prompts are an epoch). `long` stands
    before every fourth."""
    rng = random.Random(0)
    words = ["".join(rng.choice("abcd") for _ in range(3)) for _ in range(count + 4)]
    prompts = [f"{long if i % 4 == 0 else ''}First of {word}:" for i, word in enumerate(words)]
    records = [
        {"id": f"r{i}", "prompt": prompt, "answer": word[0]}
        for i, (prompt, word) in enumerate(zip(prompts, words, strict=True))
    ]
    train = write_jsonl(folder / "train.jsonl", records[:count])
    held_out = write_jsonl(folder / "eval.jsonl", records[count:])
    return {"data__sources__reverse__path": train, "data__sources__reverse__eval_path": held_out}


def picture(file: pathlib.Path, colour: tuple[int, int, int], size: tuple[int, int] = (32, 32)) -> pathlib.Path:
    Image.new("RGB", size, colour).save(file)
    return file


def filmed(file: pathlib.Path, frames: Iterable[np.ndarray], **options: str) -> pathlib.Path:
    """An h264 clip of these pictures of 32 x 32 pixels."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=4, options=options)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file


def clip(file: pathlib.Path, colour: tuple[int, int, int], frames: int = 6) -> pathlib.Path:
    """A bar moves over a coloured ground."""
    pictures = np.full((frames, 32, 32, 3), colour, np.uint8)
    for index, pixels in enumerate(pictures):
        pixels[:, 4 * index : 4 * index + 4] = 255
    return filmed(file, pictures)


COLOURS = {"red": (200, 30, 30), "blue": (30, 30, 200), "green": (30, 200, 30)}


def colours(folder: pathlib.Path) -> dict[str, object]:
    """Pictures and clips for `configs/vlm.py`: which colour is it?"""
    made: dict[str, object] = {}
    for source, field, suffix, make in (("digits", "images", "png", picture), ("pans", "videos", "mp4", clip)):
        records = []
        for index, (name, colour) in enumerate(COLOURS.items()):
            make(folder / f"{name}.{suffix}", colour)
            records.append({"id": str(index), "prompt": "Colour?", "answer": name[0], field: [f"{name}.{suffix}"]})
        file = write_jsonl(folder / f"{source}.jsonl", records)
        made |= {f"data__sources__{source}__path": file, f"data__sources__{source}__eval_path": file}
        made[f"data__sources__{source}__reward"] = "exact"
    return made


# --- in this process ----------------------------------------------------------------------------


def trained(run_dir: pathlib.Path, config: str, arguments: list[str], *callbacks: Callback) -> TrainingResult:
    """Trains to the end, or on from what is in the folder, in this process."""
    with FluxTrainer(load([f"--config={config}", f"--config.run_dir={run_dir}", *arguments])) as trainer:
        return trainer.fit(callbacks=callbacks)


class Diary(Callback):
    """The groups and the metrics of each step; stops the run after `stop_after`."""

    def __init__(self, stop_after: int = 0) -> None:
        self.stop_after = stop_after
        self.groups: dict[int, list[Group]] = {}
        self.metrics: dict[int, dict[str, float]] = {}

    def on_step(self, trainer, step, groups, metrics) -> None:
        self.groups[step], self.metrics[step] = list(groups), dict(metrics)
        if step == self.stop_after:
            trainer.stop()

    @property
    def samples(self) -> list[Sample]:
        return [sample for groups in self.groups.values() for group in groups for sample in group.samples]


POLICIES: dict[str, dict[str, object]] = {
    "synchronous": {},
    "tail_batching": {"policy__prompts": 1.5, "policy__responses": 1.25},
    "april": {"policy__oversample": 2.0, "algorithm__importance__kind": "truncate"},
    "adaptive_async": {
        "policy__ratio": 1.0,
        "algorithm__importance__kind": "mask",
    },
}


class Died(Exception):
    """A run ends as if it was killed: nothing is saved any more."""


class DiesAt(Callback):
    """Ends a run when `hook`, a method of `Callback`, is called for `step`."""

    def __init__(self, hook: str, step: int = 0) -> None:
        self._step = step
        setattr(self, hook, self._die)

    def _die(self, trainer: Any, step: int = 0, *_: object) -> None:
        if step == self._step:
            raise Died


def as_if_killed(complete: pathlib.Path, run_dir: pathlib.Path, step: int) -> pathlib.Path:
    """Copies a complete run without its checkpoints beyond `step` and without what a run writes at its end."""
    shutil.copytree(complete, run_dir, ignore=shutil.ignore_patterns("model", "adapter", "summary.json"))
    for later in (later for later in checkpoint_steps(run_dir) if later > step):
        shutil.rmtree(run_dir / "checkpoints" / str(later))
    assert checkpoint_steps(run_dir)[-1] == step
    return run_dir


def assert_goes_on(
    complete: pathlib.Path, run_dir: pathlib.Path, config: str, arguments: list[str], step: int
) -> pathlib.Path:
    """From its checkpoint of a step, a complete run ends with the same bits."""
    trained(as_if_killed(complete, run_dir, step), config, arguments)
    assert summary(run_dir)["resumed_from"] == [*summary(complete)["resumed_from"], step]
    assert_same_run(run_dir, complete)
    return run_dir


# --- processes ----------------------------------------------------------------------------------


class Commands:
    """Starts `python -m fluxjax.train`; all runs of a test session share what they compile."""

    def __init__(self) -> None:
        ours = os.pathsep.join((str(ROOT), str(ROOT / "tests")))  # a configuration may name what a test's file has
        self.env = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": ours}

    def start(
        self, run_dir: pathlib.Path, config: str, arguments: list[str], processes: int = 1, launch: Sequence[str] = ()
    ) -> subprocess.Popen:
        """`launch` are further arguments of what starts several processes, of one device each. A single one has as many
        as this process: it loads what was compiled here, and its bits are those of a run here."""
        env, command = dict(self.env), [sys.executable, "-m", "fluxjax.train"]
        if processes > 1:
            env["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"  # the last one counts
            command[2:] = ["fluxjax.launch", "--processes", str(processes), *launch, "--"]
        command += [f"--config={config}", f"--config.run_dir={run_dir}", *arguments]
        log = run_dir.parent / f"{run_dir.name}.log"
        with log.open("ab") as output:
            return forked(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)

    def run(
        self, run_dir: pathlib.Path, config: str, arguments: list[str], *, processes: int = 1, timeout: float = 300
    ) -> str:
        """To the end, which must be a good one; returns what it printed."""
        process = self.start(run_dir, config, arguments, processes)
        with ended(process):
            code = process.wait(timeout)
        text = (run_dir.parent / f"{run_dir.name}.log").read_text()
        assert code == 0, text[-4000:]
        return text


@contextlib.contextmanager
def ended(process: subprocess.Popen):
    """No process outlives its test."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def signal_when(
    process: subprocess.Popen, condition: Callable[[], bool], number: int = signal.SIGKILL, timeout: float = 300
) -> int:
    """Sends the signal as soon as the condition holds; returns the exit status (negative: of that signal)."""
    with ended(process):
        deadline = time.monotonic() + timeout
        while not condition():
            assert process.poll() is None, f"the run ended with {process.returncode} before it could be interrupted"
            assert time.monotonic() < deadline, "the moment to interrupt the run never came"
            time.sleep(0.0005)
        process.send_signal(number)
        return process.wait(timeout)


# --- what a run left behind ---------------------------------------------------------------------


def logged(run_dir: pathlib.Path, phase: str, step: int) -> Callable[[], bool]:
    """Whether a step of a phase stands in metrics.jsonl."""
    return lambda: any(r["phase"] == phase and r["step"] >= step for r in read(run_dir / "metrics.jsonl"))


def checkpoint_steps(run_dir: pathlib.Path) -> list[int]:
    folder = run_dir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def writing(run_dir: pathlib.Path, step: int) -> Callable[[], bool]:
    """Whether the checkpoint of a step is being written: under the name Orbax gives it until it is complete."""
    return lambda: any((run_dir / "checkpoints").glob(f"{step}.orbax-checkpoint-tmp*"))


def summary(run_dir: pathlib.Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def checkpoint_arrays(run_dir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its path: parameters, optimizer state, version."""
    folder = run_dir / "checkpoints" / str(step) / "arrays"
    with ocp.StandardCheckpointer() as reader:
        tree = reader.metadata(folder).item_metadata.tree
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
        arrays = reader.restore(folder, target)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)}


def model_arrays(run_dir: pathlib.Path) -> dict[str, np.ndarray]:
    return load_file(run_dir / "model" / "model.safetensors")


def without_times(records: list[dict]) -> list[dict]:
    def timed(name: str) -> bool:
        return name in ("time", "tokens_per_second") or name.startswith(
            ("seconds/", "rewards/", "data/", "environments/", "scheduling/")
        )

    return [{name: value for name, value in record.items() if not timed(name)} for record in records]


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    assert not different, f"{len(different)} of {len(one)} arrays differ: {different[:5]}"


def assert_same_run(run_dir: pathlib.Path, reference: pathlib.Path) -> None:
    """Bit for bit the same parameters, optimizer state, losses, rewards, accuracies and counts."""
    last = checkpoint_steps(reference)[-1]
    assert checkpoint_steps(run_dir)[-1] == last
    assert_same_bits(model_arrays(run_dir), model_arrays(reference))
    assert_same_bits(checkpoint_arrays(run_dir, last), checkpoint_arrays(reference, last))
    mine, theirs = (without_times(read(folder / "metrics.jsonl")) for folder in (run_dir, reference))
    assert [(r["phase"], r["step"]) for r in mine] == [(r["phase"], r["step"]) for r in theirs]
    assert mine == theirs
    own, other = summary(run_dir), summary(reference)
    for values in (own, other):
        del values["seconds"], values["resumed_from"]
    assert own == other
