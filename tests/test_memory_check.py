"""The memory part of the pre-flight as `train` runs it: what it refuses and chooses, what the run compiles again."""

import json
import os
import subprocess
import sys

import jax
import pytest
from packing_cases import MODEL, make_config
from run_cases import ROOT

from fluxjax.config import ConfigError, Remat, cli
from fluxjax.run import parts
from fluxjax.run.parts import settled_remat
from fluxjax.run.trainer import FluxTrainer
from fluxjax.sizing.account import GIB
from fluxjax.sizing.check import DeviceRoom, check
from sharding.mesh import make_mesh

TINY = """
    model.tiny.hidden_size=16 model.tiny.intermediate_size=32 model.tiny.num_layers=2
    model.tiny.num_heads=2 model.tiny.num_kv_heads=1
    warm_start.steps=0 rollout.prompts_per_step=4 rollout.group_size=4 rollout.slots=256 packing.tokens_per_row=32
    packing.rows_per_device=2 evaluation.samples=2 sharding.devices=1 steps=1
"""


def flags(**more):
    settings = [*TINY.split(), *(f"{name.replace('__', '.')}={value}" for name, value in more.items())]
    return ["--config=configs/text.py:debug", *(f"--config.{setting}" for setting in settings)]


@pytest.mark.long
@pytest.mark.turn(1)
def test_a_run_that_does_not_fit_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("models.create", lambda *_: pytest.fail("weights were drawn"))
    monkeypatch.chdir(ROOT)
    config = cli.load(flags(run_dir=tmp_path, sharding__device_memory_gib=0.012, rollout__slots=4096))
    with pytest.raises(ConfigError) as refused:
        FluxTrainer(config)
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("DOES NOT FIT: the peak is 0.0") and "(decode)" in lines[0]
    assert lines[0].endswith("0.012 of 0.012 GiB with sharding.device_memory_gib=0.012.")
    assert lines[1].startswith("It would fit with")
    assert any(line.strip().startswith("--config.rollout.slots=") for line in lines[2:])
    assert lines[-1].endswith("--config.sharding.preflight=false")


@pytest.mark.long
@pytest.mark.turn(0)
def test_a_run_that_fits_compiles_nothing_of_it_again(tmp_path):
    cache = tmp_path / "programs"
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    settings = {"sharding__device_memory_gib": 1, "sharding__remat": "auto"}
    command = [sys.executable, "-m", "fluxjax.train", *flags(run_dir=tmp_path / "run", **settings)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiling accumulate, 2 layers" in done.stdout
    compiled = [file.name.split("-")[0] for file in cache.glob("jit_*-cache")]
    assert compiled.count("jit_apply") == 1  # the check's; a run without it has one, too, of its own
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["sharding"]["remat"] == "auto", "as asked for: the run may go on, or be evaluated, on other devices"
    assert written["rollout"]["engines"] == 0


def small(remat=Remat.AUTO):
    config = make_config()
    config.rollout.max_new_tokens, config.rollout.max_sequence_tokens, config.rollout.slots = 10, 44, 8
    config.packing.rows_per_device, config.sharding.remat = 64, remat
    return config


@pytest.mark.long
@pytest.mark.turn(2)
def test_auto_is_the_first_rematerialisation_that_fits():
    def found(gib, sleeping=False):
        room = DeviceRoom(gib * GIB, gib * GIB, "a test")
        return check(small(), MODEL, jax.devices()[:1], room, lambda _: None, longest_row=False, sleeping=sleeping)

    roomy = found(1.0)
    assert roomy.fits and roomy.remat is Remat.NONE and roomy.largest_row is None
    needed = roomy.account.bytes / GIB
    assert roomy.account.peak()[0] == "accumulate"
    tight = found(0.99 * needed)
    assert tight.fits and tight.remat is not Remat.NONE and tight.account.bytes < roomy.account.bytes
    assert tight.json()["remat"] == tight.remat.value
    assert found(0.99 * needed, sleeping=True).remat is Remat.NONE  # the memory of the engine is free meanwhile


def test_on_cpus_nothing_is_compiled_unless_asked_for(monkeypatch):
    monkeypatch.setattr("fluxjax.sizing.check.check", lambda *_, **__: pytest.fail("it was checked"))
    mesh = make_mesh(1)
    assert settled_remat(small(), MODEL, mesh, (), print) is Remat.NONE
    assert settled_remat(small(Remat.DOTS), MODEL, mesh, (), print) is Remat.DOTS
    config = small()
    config.sharding.device_memory_gib, config.sharding.preflight = 1.0, False
    assert settled_remat(config, MODEL, mesh, (), print) is Remat.NONE


def test_offloading_is_refused_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr(parts, "_has_host_memory", lambda: False)
    with pytest.raises(ConfigError, match=r"sharding\.remat is offload, but cpu devices have no pinned_host memory"):
        settled_remat(small(Remat.OFFLOAD), MODEL, make_mesh(1), (), print)
