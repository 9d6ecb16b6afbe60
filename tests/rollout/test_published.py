"""Weights in shared memory: what is written, and what is left of it when a run ends in whatever way."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from protocol_cases import ROOT, model
from safetensors.numpy import save_file

import models
from rollout.engine import EngineError, WeightsMismatch
from rollout.weights import published
from rollout.weights.published import PREFIX, Checksums, SharedFolders, sha256


@pytest.fixture
def memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(published, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.mark.medium
def test_a_version_is_written_once(memory: pathlib.Path) -> None:
    whole = model("text")
    folders, params = SharedFolders(whole.config, "float32"), models.split(whole)[1]
    first = folders.write(1, params)
    assert folders.write(1, params) is first
    again = folders.write(1, models.split(model("text", 1))[1])  # other weights under the same number
    assert again is not first and again.folder != first.folder
    with pytest.raises(EngineError, match=r"norm.* is missing"):
        folders.write(1, {name: value for name, value in params.items() if name != "norm"})
    folders.keep([again])
    assert first.folder.exists()  # the newest of the others: a server may be reading it
    folders.keep([folders.write(2, params)])
    assert not first.folder.exists() and again.folder.exists()
    folders.close()
    assert not list(memory.iterdir())


def test_a_run_that_was_killed_leaves_nothing_for_long(memory: pathlib.Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead, living = memory / f"{PREFIX}{child.pid}-a", memory / f"{PREFIX}{os.getpid()}-b"
    for folder in (dead, living):
        folder.mkdir()
    SharedFolders(model("text").config, "float32").close()
    assert not dead.exists() and living.exists()


@pytest.mark.slow
def test_a_run_that_is_not_closed_leaves_nothing(tmp_path: pathlib.Path) -> None:
    program = (
        "import pathlib; from models.config import DecoderConfig; from rollout_cases import TEXT\n"
        "from rollout.weights import published\n"
        f"published.SHARED_MEMORY = pathlib.Path({str(tmp_path)!r})\n"
        "folders = published.SharedFolders(TEXT, 'float32')\n"
        "assert list(published.SHARED_MEMORY.iterdir())\n"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "rollout")])
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": paths}, timeout=120)
    assert not list(tmp_path.iterdir())


def test_linear_attention_is_divided_over_ranks(tmp_path: pathlib.Path) -> None:
    """A rank of SGLang has some heads of each part. With two, SGLang's own checksums were seen to be these."""
    rng, size = np.random.default_rng(), 2
    keys, values = (int(n) * size for n in rng.integers(1, 5, 2))
    heads, width = int(rng.integers(1, 4)) * size, 6
    rows = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    parts = {name: rng.normal(size=(count, width)).astype(np.float32) for name, count in rows.items()}
    filters = {name: rng.normal(size=(rows[name], 1, 4)).astype(np.float32) for name in "qkv"}
    states = {name: rng.normal(size=heads).astype(np.float32) for name in ("A_log", "dt_bias")}
    out, gate = rng.normal(size=(width, values)).astype(np.float32), rng.normal(size=4).astype(np.float32)
    disk = {
        "in_proj_qkv.weight": np.concatenate([parts[name] for name in "qkv"]),
        **{f"in_proj_{name}.weight": parts[name] for name in "zba"},
        "conv1d.weight": np.concatenate(list(filters.values())),
        **states,
        "out_proj.weight": out,
        "norm.weight": gate,
    }
    prefix = "model.language_model.layers.4.linear_attn."
    save_file({prefix + name: tensor for name, tensor in disk.items()}, tmp_path / "model.safetensors")

    def of(rank: int, tensors: list[np.ndarray], axis: int = 0) -> list[np.ndarray]:
        return [np.ascontiguousarray(np.split(tensor, size, axis)[rank]) for tensor in tensors]

    held = [
        {
            "in_proj_qkvz.weight": of(rank, [parts[name] for name in "qkvz"]),
            "in_proj_ba.weight": of(rank, [parts[name] for name in "ba"]),
            "conv1d.weight": of(rank, list(filters.values())),
            **{name: of(rank, [state]) for name, state in states.items()},
            "out_proj.weight": of(rank, [out], axis=1),
            "norm.weight": [gate],
        }
        for rank in range(size)
    ]
    ranks = [{f"model.layers.4.linear_attn.{n}": sha256(tensors) for n, tensors in rank.items()} for rank in held]
    sums = Checksums(tmp_path / "model.safetensors", 2)
    sums.check(ranks, "server")
    for name in ranks[1]:
        with pytest.raises(WeightsMismatch, match=f"rank 1.*{name}"):
            sums.check([ranks[0], ranks[1] | {name: "0" * 16}], "server")
