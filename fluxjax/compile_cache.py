"""Compiled programs are kept on disk: a resumed run, an evaluation, the next run start at once."""

from __future__ import annotations

import os

import jax

from .data.embedded import default_root


def use_compile_cache() -> None:
    """Keeps them beside the embedded data sets; `JAX_COMPILATION_CACHE_DIR` says otherwise."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(default_root() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
