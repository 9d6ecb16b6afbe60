"""Descriptions of devices that this machine lacks: XLA compiles for a described GPU, and runs nothing.

No GPU is needed, but two packages are: `jax-cuda12-plugin` and `jax-cuda12-pjrt` (or CUDA 13's), in jaxlib's version.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
from typing import Any

from ..base.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = pathlib.Path(__file__).parent / "targets"
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX's environment variable
FOLDER = "FLUXJAX_AOT"  # the environment variable that names the folder of the plugin; unset: see `find_plugin`
CUDA = ("cuda12", "cuda13")  # CUDA's versions in the names of JAX's packages


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts with equally many devices each, all of one kind: `1x8xh100`."""

    hosts: int
    devices_per_host: int
    kind: str

    @staticmethod
    def parse(text: str) -> Topology:
        """Reads `HOSTSxDEVICESxKIND`. Raises ConfigError, which lists the kinds, for other text."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x(\w+)", text.lower())
        if match is None or match[3] not in kinds():
            raise ConfigError(
                f"--topology {text}: give HOSTSxDEVICESxKIND, such as 1x8xh100 (one host of eight) or 4x8xh100; "
                f"kinds are {', '.join(kinds())}"
            )
        return Topology(int(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices_per_host}x{self.kind}"

    @property
    def description(self) -> str:
        """A device's description for XLA (a `GpuTargetConfigProto`)."""
        return (TARGETS / f"{self.kind}.txtpb").read_text()

    @property
    def memory(self) -> int:
        """The bytes of a device's memory."""
        match = re.search(r"device_memory_size: (\d+)", self.description)
        assert match is not None, f"{self.kind}.txtpb says nothing of memory"
        return int(match[1])

    def devices(self) -> list[Any]:
        """Returns the devices, host by host. Needs the CUDA plugin: see `find_plugin`."""
        from jax.experimental import topologies

        described = {"topology": f"1x{self.hosts}x{self.devices_per_host}", "target_config": self.description}
        return list(topologies.get_topology_desc(platform="cuda", topology_name=self.kind, **described).devices)


def kinds() -> list[str]:
    """Returns the kinds of device that the package describes."""
    return sorted(file.stem for file in TARGETS.glob("*.txtpb"))


def memory_fraction(default: float) -> float:
    """Returns the share of a device's memory that JAX may use: `MEMORY_FRACTION` in the environment, else `default`.
    Raises ConfigError if the environment's value is no number."""
    given = os.environ.get(MEMORY_FRACTION, "")
    try:
        return float(given or default)
    except ValueError:
        raise ConfigError(f"{MEMORY_FRACTION} is {given!r}, which is not a number") from None


def find_plugin(folder: str = "") -> None:
    """Lets JAX find its CUDA plugin: in `folder`, else in the folder that FLUXJAX_AOT names, else in the checkout's
    .aot (from `bash scripts/test.sh aot`), else in the Python environment. Call `find_plugin` before JAX is imported:
    JAX then runs on the CPU and touches no GPU. Raises ConfigError if it is absent, or not of jaxlib's version."""
    jaxlib = importlib.metadata.version("jaxlib")
    folder = folder or os.environ.get(FOLDER, "")
    installed = ROOT / ".aot" / f"{jaxlib}-triton"
    if not folder and installed.is_dir():
        folder = str(installed)
    where = folder or "this environment"
    if folder and not pathlib.Path(folder).is_dir():
        raise ConfigError(f"{folder}: no such folder; {_how(jaxlib)}")
    path = [folder] if folder else sys.path
    for name in plugin_packages(path):
        version = _version(name, path)
        if version is None:
            raise ConfigError(f"{name}, which has XLA's compiler for GPUs, is not in {where}; {_how(jaxlib)}")
        if version != jaxlib:
            raise ConfigError(f"{name} in {where} is {version}, but jaxlib is {jaxlib}; {_how(jaxlib)}")
    if folder:
        sys.path.insert(0, folder)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the plugin says many times that there is no driver


def plugin_packages(path: list[str]) -> tuple[str, str]:
    """Returns the packages of JAX's CUDA plugin and its compiler, for the CUDA version on `path`, else for CUDA 12."""
    return next((names for names in map(_packages, CUDA) if _version(names[0], path)), _packages(CUDA[0]))


def _packages(cuda: str) -> tuple[str, str]:
    return f"jax-{cuda}-plugin", f"jax-{cuda}-pjrt"


def _version(name: str, path: list[str]) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=name, path=path)), None)


def _how(version: str) -> str:
    folder = f".aot/{version}-triton"
    packages = " ".join(f"{name}=={version}" for name in _packages(CUDA[0]))
    install = f"pip install --no-deps --target {folder} {packages} 'jax-triton<0.4' 'triton<3.8'"
    return f"no GPU is needed: {install}; then --aot-folder {folder}, or FLUXJAX_AOT={folder}"
