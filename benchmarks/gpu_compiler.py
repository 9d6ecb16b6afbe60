"""Finds XLA's compiler for GPUs, or installs it, for benchmarks that compile without a GPU."""

from __future__ import annotations

import subprocess
import sys

from fluxjax.base.errors import ConfigError
from fluxjax.sizing.topology import ROOT, find_plugin


def find_compiler() -> None:
    """Finds the compiler as `fluxjax.preflight` does. If it is absent, installs it by `scripts/install_aot.sh`."""
    try:
        find_plugin()
    except ConfigError:
        install = ["bash", ROOT / "scripts" / "install_aot.sh", sys.executable, "cuda12"]
        folder = subprocess.run(install, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        find_plugin(folder)
