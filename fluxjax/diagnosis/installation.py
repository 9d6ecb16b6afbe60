"""Checks of this machine: devices, driver and JAX's CUDA, kernels, memory, the sandbox of code rewards, decoders."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import jax

from models.processing.media import MediaSettings
from rollout.weights.published import scratch_folder
from sharding.mesh import triton_trouble

from ..config import ConfigError
from ..rewards.sandbox import find_sandbox
from . import Finding
from .probes import clip_file, picture_file

CUDA = "pip install 'fluxjax[cuda12]', or 'fluxjax[cuda13]' for drivers since 580"


def installation() -> Iterator[Finding]:
    """Yields the findings of this machine."""
    driver, device = _driver(), jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    blind = driver and on_cpu and os.environ.get("JAX_PLATFORMS") != "cpu"
    yield Finding("devices", f"{jax.local_device_count()} x {device.device_kind}", CUDA if blind else "")
    yield _driver_and_cuda(driver)
    trouble = "there is no GPU that needs it" if on_cpu else triton_trouble()
    yield Finding("jax-triton", trouble or "can be imported", CUDA if trouble else "", asked=not on_cpu)
    stats, scratch = device.memory_stats() or {}, scratch_folder()
    free = {
        "host": os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        scratch: shutil.disk_usage(scratch).free,
    }
    free["device"] = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    yield Finding("memory", "free GiB: " + ", ".join(f"{name} {size / 2**30:.1f}" for name, size in free.items()))
    try:
        find_sandbox("bubblewrap", slots=1)
        yield Finding("bubblewrap", "runs code of responses")
    except (ConfigError, OSError) as error:
        yield Finding("bubblewrap", f"needed by rewards that run code (docs/rewards.md): {error}", asked=False)
    try:
        for kind, data in (("image", picture_file()), ("video", clip_file())):
            MediaSettings().load(kind, data)
        yield Finding("decoder", "an image and a video")
    except Exception as error:  # whatever a library that is built otherwise raises
        yield Finding("decoder", repr(error), "pip install --force-reinstall av pillow")


def _driver() -> str:
    """The output of nvidia-smi; empty without a driver or a GPU."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=True).stdout
    return ""


def _driver_and_cuda(driver: str) -> Finding:
    """Compares the CUDA that the driver supports with that of JAX's plugin, and the plugin's version with jaxlib's."""
    versions: dict[str, str] = {}
    for package in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    stated = re.search(r"Driver Version: (\S+).*?CUDA Version: (\d+)", driver)
    detail = f"driver {stated[1]}, CUDA {stated[2]}, {versions}" if stated else f"nvidia-smi shows no GPU; {versions}"
    usable = [versions.get(f"jax-cuda{cuda}-plugin") for cuda in (12, 13) if stated and cuda <= int(stated[2])]
    return Finding("driver and CUDA", detail, "" if versions["jaxlib"] in usable else CUDA, asked=bool(stated))
