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
from sharding.mesh import Device, triton_trouble

from ..config import Config, ConfigError
from ..rewards.sandbox import find_sandbox
from .findings import Finding, differs, ok, unknown
from .probes import clip_file, picture_file

CUDA = "pip install 'fluxjax[cuda12]', or 'fluxjax[cuda13]' for drivers since 580"


def installation(config: Config | None = None) -> Iterator[Finding]:
    """Yields the findings of this machine. A missing sandbox counts as a difference if `config` has rewards of code."""
    devices, driver = jax.local_devices(), _driver()
    platform = devices[0].platform
    kinds = f"{len(devices)} x {devices[0].device_kind}, JAX {jax.__version__}"
    blind = driver and platform == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu"
    yield differs("devices", f"{kinds}, though there is a GPU", CUDA) if blind else ok("devices", kinds)
    yield from _cuda(driver)
    if platform == "cpu":
        yield unknown("jax-triton", "there is no GPU, so that its kernels are not needed")
    elif trouble := triton_trouble():
        yield differs("jax-triton", trouble, CUDA)
    else:
        yield ok("jax-triton", importlib.metadata.version("jax-triton"))
    yield ok("memory", _memory(devices[0]))
    yield _sandbox(config is not None and any("code" in s.reward_names for s in config.data.sources.values()))
    try:
        for kind, data in (("image", picture_file(0)), ("video", clip_file())):
            MediaSettings().load(kind, data)
        yield ok("decoder", "an image and a video")
    except Exception as error:  # whatever a library that is built otherwise raises
        yield differs("decoder", repr(error), "pip install --force-reinstall av pillow")


def _driver() -> str:
    """The output of nvidia-smi; empty without a driver or a GPU."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=True).stdout
    return ""


def _cuda(driver: str) -> Iterator[Finding]:
    """Compares the CUDA that the driver knows with that of JAX's plugin, and the plugin's version with JAX's."""
    versions: dict[str, str] = {}
    for package in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    told = ", ".join(map(" ".join, versions.items()))
    known = re.search(r"Driver Version: (\S+).*?CUDA Version: (\d+)", driver)
    if known is None:
        yield unknown("driver and CUDA", f"nvidia-smi shows no GPU; {told}")
        return
    detail = f"driver {known[1]} (CUDA {known[2]}), {told}"
    plugins = {int(package[8:10]): version for package, version in versions.items() if package != "jaxlib"}
    if plugins and min(plugins) <= int(known[2]) and versions["jaxlib"] in plugins.values():
        yield ok("driver and CUDA", detail)
    else:
        yield differs("driver and CUDA", detail, CUDA)


def _memory(device: Device) -> str:
    """The free memory of a device, of the host, and of the folder in which servers read weights."""
    stats = device.memory_stats() or {}
    free = {"host": os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    free[str(scratch_folder())] = shutil.disk_usage(scratch_folder()).free
    if "bytes_limit" in stats:
        free["a device, of what JAX may take"] = stats["bytes_limit"] - stats["bytes_in_use"]
    return "free GiB: " + ", ".join(f"{place} {size / 2**30:.1f}" for place, size in free.items())


def _sandbox(needed: bool) -> Finding:
    try:
        find_sandbox("bubblewrap", slots=1)
        return ok("bubblewrap", "runs code of responses")
    except (ConfigError, OSError) as error:
        if needed:
            return differs("bubblewrap", str(error), "apt-get install bubblewrap, or see docs/rewards.md")
        return unknown("bubblewrap", f"needed by rewards that run code only: {error}")
