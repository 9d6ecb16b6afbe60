"""Tests marked `gpu` are skipped, visibly, where there is no GPU, and fail where there is one that they cannot use."""

import pathlib

import pytest
from conftest import ROOT
from cuda_ahead import run_on_gpu

PROGRAM = ROOT / "tests/sharding/flash_program.py"
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
        run_on_gpu(PROGRAM)
