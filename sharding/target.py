"""The platform that programs are traced for, where that is not the one that runs them: compiling ahead for GPUs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_platform: contextvars.ContextVar[str] = contextvars.ContextVar("platform", default="")


def platform() -> str:
    """`cpu`, `gpu`, ...: JAX's default, but within `compiling_for`."""
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """What is traced within makes its choices for this platform."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)
