"""Settings of this process: memory, garbage collector, cache of compiled programs.

XLA's CPU client allocates the temporary buffers of a program at each execution. By default glibc maps and unmaps large
blocks, so that every step touches fresh pages. Page faults take a quarter to a third of the CPU time of a tiny model's
train step. `keep_freed_memory` avoids page faults, and resident memory stays at its peak.
"""

import contextlib
import ctypes
import functools
import gc
import inspect
import os
import pathlib
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .process_tree import resident

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_DEFAULT_MMAP_MAX, _LARGE_BLOCK = 65536, 32 << 20  # a number of mappings; bytes (glibc's largest threshold)
LARGE_MODEL = 1 << 30  # bytes of weights; a model of at least this size is large


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory. Must be called before there are threads, because existing arenas stay
    unchanged. Returns False, and changes nothing, if the C library is not glibc."""
    # One arena, because threads' arenas cannot hold large blocks. No mapped blocks. No trimming below 2 GiB.
    return _set_malloc((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1))


def give_back_large_blocks() -> bool:
    """Undoes `keep_freed_memory` for blocks of at least 32 MiB. With a large model, the holes that freed arrays leave
    exceed a second copy of the weights. Returns False, and changes nothing, if the C library is not glibc."""
    return _set_malloc((_MMAP_THRESHOLD, _LARGE_BLOCK), (_MMAP_MAX, _DEFAULT_MMAP_MAX))


def _set_malloc(*options: tuple[int, int]) -> bool:
    """Gives each (option, value) to glibc's `mallopt`, up to the first refused pair. Returns True if none is."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  other C libraries have a mallopt that does nothing
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(option, value) for option, value in options)


def settle_heap() -> None:
    """Hides all living objects from the garbage collector. Repeated looks at the objects of imports and compiled
    programs take a tenth of a tiny model's step. Must be called only in a process that ends with its run, because
    hidden circles of references are never freed."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector in all threads, for work that makes many objects but no circles of references."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes, or its peak on systems without /proc."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resident([os.getpid()]) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


HASHED = ("hash_obj", "compile_options_obj", "strip_device_assignment")
HASHED_ACCELERATORS = ("hash_obj", "accelerators")
INSTRUCTIONS = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features")  # fields of /proc/cpuinfo


def cache_folder() -> pathlib.Path:
    """Returns the folder `fluxjax` of `$XDG_CACHE_HOME` (`~/.cache`), for compiled programs and embedded data sets."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (pathlib.Path(cache) if cache else pathlib.Path.home() / ".cache") / "fluxjax"


def use_compile_cache() -> None:
    """Stores compiled programs in the folder `JAX_COMPILATION_CACHE_DIR`, by default `xla` in `cache_folder()`."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    share_between_devices()


@functools.cache
def share_between_devices() -> bool:
    """Lets CPU devices and processes load each other's compiled programs from the cache. Returns False if JAX's
    functions are missing or have other parameters than expected.

    JAX's key of a program has the device's number, except on GPUs, so that programs of one device (ODC) would be
    compiled for each device. The key also has the process's number, and only the first process writes to the cache, so
    that the other processes would compile everything at each start. No option of JAX 0.10.2 changes these keys. This
    function therefore replaces the functions of JAX that compute the keys.
    """
    try:
        from jax._src import cache_key

        key: Callable[..., None] = cache_key._hash_serialized_compile_options
        if tuple(inspect.signature(key).parameters) != HASHED:
            return False
        accelerator: Callable[..., None] = cache_key._hash_accelerator_config
        if tuple(inspect.signature(accelerator).parameters) != HASHED_ACCELERATORS:
            return False
    except (ImportError, AttributeError):
        return False

    def hashed(hash_obj: object, compile_options_obj: Any, strip_device_assignment: bool = False) -> None:
        devices = compile_options_obj.device_assignment
        alone = devices is not None and devices.replica_count() * devices.computation_count() == 1
        strip = strip_device_assignment or (alone and jax.default_backend() == "cpu")
        key(hash_obj, compile_options_obj, strip_device_assignment=strip)

    def hashed_accelerators(hash_obj: Any, accelerators: Any) -> None:
        machine = _instructions() if jax.default_backend() == "cpu" else ""
        if machine:
            hash_obj.update(f"{jax.local_device_count()} of {machine}".encode())
        else:
            accelerator(hash_obj, accelerators)

    cache_key._hash_serialized_compile_options = hashed
    cache_key._hash_accelerator_config = hashed_accelerators
    return True


@functools.cache
def _instructions() -> str:
    """Returns the model of this machine's CPU and its instruction sets, or an empty text without /proc."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(INSTRUCTIONS))
