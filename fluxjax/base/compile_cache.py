"""Compiled programs are kept on disk: a resumed run, an evaluation, the next run start at once."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import jax

from .cache_folder import cache_folder

HASHED = ("hash_obj", "compile_options_obj", "strip_device_assignment")


def use_compile_cache() -> None:
    """Keeps them beside the embedded data sets; `JAX_COMPILATION_CACHE_DIR` says otherwise."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    share_between_devices()


@functools.cache
def share_between_devices() -> bool:
    """What one CPU device compiled is found by the others, as JAX has it between GPUs; False where it can't be had.

    Programs that run on one device (ODC's) are compiled once for each of them otherwise. JAX offers no public way: its
    key of a program holds the device's number, but on GPUs. Where its code is another than known here, nothing changes.
    """
    try:
        from jax._src import cache_key

        key: Any = cache_key._hash_serialized_compile_options
        if tuple(inspect.signature(key).parameters) != HASHED:
            return False
    except (ImportError, AttributeError):
        return False

    def hashed(hash_obj: Any, compile_options_obj: Any, strip_device_assignment: bool = False) -> Any:
        devices = compile_options_obj.device_assignment
        alone = devices is not None and devices.replica_count() * devices.computation_count() == 1
        strip = strip_device_assignment or (alone and jax.default_backend() == "cpu")
        return key(hash_obj, compile_options_obj, strip_device_assignment=strip)

    cache_key._hash_serialized_compile_options = hashed
    return True
