"""Programs on disk: what one device or process compiled, the others load."""

import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from process_cases import Processes

from fluxjax.base.process import share_between_devices

OPTIONS: Any = jax.config  # attributes made at run time


@pytest.fixture
def every_program():
    """Also those that compile at once are kept."""
    before = OPTIONS.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def named_anew(function: Callable) -> str:
    """Gives the function a name that no earlier session has kept a program of."""
    function.__name__ += uuid.uuid4().hex
    return function.__name__


def kept(name: str) -> list[pathlib.Path]:
    return list(pathlib.Path(OPTIONS.jax_compilation_cache_dir).glob(f"jit_{name}-*-cache"))


def test_what_one_device_compiled_the_others_load(every_program):
    assert share_between_devices()

    def found_by_all_devices(x):
        return jnp.sin(x) @ x, x.sum()

    name = named_anew(found_by_all_devices)
    program = jax.jit(found_by_all_devices)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    results = [program(jax.device_put(x, device)) for device in jax.devices()]
    for device, result in zip(jax.devices(), results, strict=True):
        assert all(part.devices() == {device} for part in result)
        jax.tree.map(np.testing.assert_array_equal, result, results[0])
    assert len(kept(name)) == 1


def test_programs_of_several_devices_are_told_apart(every_program):
    """One that talks to others is not loaded in the place of the same one for other devices."""

    def found_by_nobody_else(x):
        return x.sum()

    name = named_anew(found_by_nobody_else)
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        place = jax.sharding.NamedSharding(jax.make_mesh((2,), ("i",), devices=devices), jax.P("i"))
        assert jax.jit(found_by_nobody_else)(jax.device_put(np.ones(4, np.float32), place)) == 4
    assert len(kept(name)) == 2


@pytest.mark.medium
def test_what_one_process_compiled_the_others_load(tmp_path, monkeypatch):
    """A program of both processes' devices, and one of a single device; both compute what they should."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    with Processes("cache_process.py", tmp_path, [{}, {}]) as run:
        assert run.ends() == [0, 0], "".join(map(run.errors, range(2)))
        first, second = map(run.said, range(2))
    for said in (first, second):
        assert said["together"] == pytest.approx(3 + 3 * np.cos(1)) and said["alone"] == pytest.approx(6 * np.sin(1))
    assert first["cache_hits"] == 0 and first["cache_misses"] >= 2
    assert second["cache_hits"] >= 2 and second["cache_misses"] == 0
