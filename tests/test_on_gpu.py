"""What a run is made of, on a GPU against this machine's processor: `pytest -m gpu`.

Without a GPU the same programs run on the CPU, so that no GPU's time is spent on a mistake in them.
"""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from cuda_ahead import clean_environment, needs_gpu, run_on_gpu

PROGRAM, PROGRAMS = ROOT / "tests" / "gpu_program.py", {"send": ROOT / "tests" / "ipc_program.py"}
TOLERANCE = 2e-5  # of float32, of the largest value of each array; products are whole, not TF32
GAP = 1e-4  # absolute, float32: log-probs of the engine and of the trainer


def computed(folder: pathlib.Path, platforms: str, *words: str) -> dict[str, np.ndarray]:
    """What the program writes with the first device of these platforms."""
    file = folder / f"{platforms.partition(',')[0]}-{'-'.join(words)}.npz"
    env = clean_environment() | {"JAX_PLATFORMS": platforms, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    command = [sys.executable, PROGRAMS.get(words[0], PROGRAM), words[0], file, *words[1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(file) as arrays:
        found = dict(arrays)
    assert platforms == "cpu" or "NVIDIA" in str(found["device"])
    return {name: array for name, array in found.items() if name != "device"}


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float = TOLERANCE) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        largest = np.abs(want).max()
        assert largest > 0, name
        np.testing.assert_allclose(found[name], want, rtol=0, atol=tolerance * largest, err_msg=name)


def assert_one_engine(found: dict[str, np.ndarray]) -> None:
    for number in (0, 1):
        np.testing.assert_allclose(found[f"engine {number}"], found[f"whole {number}"], rtol=0, atol=GAP)


@pytest.mark.long
@pytest.mark.parametrize("what", ["forward", "engine"])
def test_programs_run(tmp_path: pathlib.Path, what: str) -> None:
    found = computed(tmp_path, "cpu", what)
    if what == "engine":
        assert_one_engine(found)
    else:
        assert_close(found, computed(tmp_path, "cpu", what, "float64"))


def assert_same_weights(found: dict[str, np.ndarray]) -> None:
    written = {name.removeprefix("written "): array for name, array in found.items() if name.startswith("written")}
    assert len(written) * 2 == len(found) > 100
    for name, array in written.items():
        assert np.array_equal(found[f"received {name}"], array), name


@pytest.mark.slow
def test_weights_are_handed_to_another_process(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch", reason="parity lane: needs torch")
    assert_same_weights(computed(tmp_path, "cpu", "send"))


@pytest.mark.gpu
def test_weights_are_handed_over_by_cuda_ipc(tmp_path: pathlib.Path) -> None:
    needs_gpu()
    assert_same_weights(computed(tmp_path, "cuda,cpu", "send"))


@pytest.mark.gpu
def test_packed_rows_are_those_of_float64(tmp_path: pathlib.Path) -> None:
    needs_gpu()
    assert_close(computed(tmp_path, "cuda,cpu", "forward"), computed(tmp_path, "cpu", "forward", "float64"), 5e-5)


@pytest.mark.gpu
def test_a_training_step_is_that_of_a_cpu(tmp_path: pathlib.Path) -> None:
    needs_gpu()
    assert_close(computed(tmp_path, "cuda,cpu", "step"), computed(tmp_path, "cpu", "step"), 5e-5)


@pytest.mark.gpu
def test_prefill_and_decode_are_the_whole_forward_pass(tmp_path: pathlib.Path) -> None:
    needs_gpu()
    found, on_cpu = computed(tmp_path, "cuda,cpu", "engine"), computed(tmp_path, "cpu", "engine")
    assert_one_engine(found)
    for number in (0, 1):
        assert list(found[f"tokens {number}"]) == list(on_cpu[f"tokens {number}"])


@pytest.mark.gpu
def test_a_run_from_end_to_end(tmp_path: pathlib.Path) -> None:
    needs_gpu()
    env = clean_environment() | {"JAX_PLATFORMS": "cuda,cpu"}
    command = [sys.executable, "-m", "fluxjax.train", "--config=configs/vlm.py:debug"]
    options = [f"--config.run_dir={tmp_path / 'run'}", "--config.steps=2", "--config.warm_start.steps=2"]
    done = subprocess.run([*command, *options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all 2 steps are done" in done.stdout + done.stderr


FLASH = ROOT / "tests" / "sharding" / "flash_program.py"
LISTED = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"


@pytest.fixture(params=["", LISTED, None], ids=["lists none", "lists one", "absent"])
def listed(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns True where the stand-in for nvidia-smi lists a GPU. JAX finds none in any case."""
    if request.param is not None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\necho '{request.param}'\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return request.param == LISTED


@pytest.mark.slow
def test_a_gpu_that_cannot_be_used_is_a_failure(listed: bool) -> None:
    with pytest.raises(AssertionError if listed else pytest.skip.Exception):
        run_on_gpu(FLASH)
