"""Keeps compiled programs on disk, so that a resumed run, an evaluation and the next run start at once."""

import functools
import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

HASHED = ("hash_obj", "compile_options_obj", "strip_device_assignment")


def cache_folder() -> pathlib.Path:
    """Returns the folder for programs and embedded data sets: `$XDG_CACHE_HOME/fluxjax`, else `~/.cache/fluxjax`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (pathlib.Path(cache) if cache else pathlib.Path.home() / ".cache") / "fluxjax"


def use_compile_cache() -> None:
    """Keeps programs in `cache_folder()`, or where `JAX_COMPILATION_CACHE_DIR` says."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    share_between_devices()


@functools.cache
def share_between_devices() -> bool:
    """Lets a CPU device load what another one compiled, as JAX does between GPUs; returns False where it cannot.

    Otherwise programs that run on one device (ODC's) are compiled once for each device, because JAX's key of a program
    holds the device's number, except on GPUs. No option of JAX 0.10.2 changes that, so its function is replaced
    here. A JAX whose function has other parameters is left as it is.
    """
    try:
        from jax._src import cache_key

        key: Callable[..., None] = cache_key._hash_serialized_compile_options
        if tuple(inspect.signature(key).parameters) != HASHED:
            return False
    except (ImportError, AttributeError):
        return False

    def hashed(hash_obj: object, compile_options_obj: Any, strip_device_assignment: bool = False) -> None:
        devices = compile_options_obj.device_assignment
        alone = devices is not None and devices.replica_count() * devices.computation_count() == 1
        strip = strip_device_assignment or (alone and jax.default_backend() == "cpu")
        key(hash_obj, compile_options_obj, strip_device_assignment=strip)

    cache_key._hash_serialized_compile_options = hashed
    return True
