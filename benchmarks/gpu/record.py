"""Records the results of `gpu_suite.py`: card and versions, a file of JSON, and a table to read."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

from .runner import Ended

PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch")


def card() -> tuple[str, str]:
    """The name of the first GPU and the version of its driver, as nvidia-smi says; without one ("cpu", "")."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        name, driver = listed.splitlines()[0].rsplit(", ", 1)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return "cpu", ""
    return name, driver


def short(card: str) -> str:
    """The first word with a digit in a card's name, in small letters: h100 for NVIDIA H100 80GB HBM3."""
    words = re.split(r"[^a-z0-9]+", card.lower())
    return next((word for word in words if re.search(r"\d", word)), words[0])


def versions(driver: str, packages: pathlib.Path | None) -> dict[str, str]:
    """The versions that the parts import; `packages` is a folder that comes before the environment."""
    path = [str(packages)] * bool(packages) + sys.path
    found = {name: next(importlib.metadata.distributions(name=name, path=path), None) for name in PACKAGES}
    known = {name: package.version for name, package in found.items() if package}
    return {"python": platform.python_version(), "driver": driver, **known}


class Results:
    """The results in a file, a JSON list. It is written again after every part, so that a kill loses nothing."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._entries: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self._lines: list[str] = []
        self.failed = False

    def add(self, name: str, ended: Ended, **about: Any) -> None:
        """Appends the result of a part; `about` are facts from before its start."""
        entry = {"part": name, "date": datetime.date.today().isoformat(), **about, "seconds": ended.seconds}
        if ended.figures is not None:
            entry["outcome"] = ended.figures
        if ended.error:
            entry["error"] = ended.error
        self.failed |= bool(ended.error)
        self._entries.append(entry)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self._entries, indent=1) + "\n")
        os.replace(unfinished, self._path)
        state = f"FAILED: {ended.error.splitlines()[-1]}" if ended.error else "ended well"
        self._lines += [f"{name:13} {ended.seconds:6.1f} s  {state}", f"  predicted: {about['prediction']}"]
        self._lines += [f"  {line}" for line in _flat("", ended.figures or {})]

    def leave_out(self, name: str, left: float) -> None:
        """Notes that a part did not begin, in the table only."""
        self._lines.append(f"{name:13} left out: {left:.0f} s were left")

    def table(self) -> str:
        """Returns the lines for a reader about the parts of this run."""
        return "\n".join([*self._lines, f"results: {self._path}"])


def _flat(name: str, value: Any) -> list[str]:
    """Lines `name: figures` of nested figures; figures that hold no further ones share a line."""
    if not isinstance(value, dict):
        return [f"{name}: {value}"]
    plain = ", ".join(f"{key} {item}" for key, item in value.items() if not isinstance(item, dict))
    lines = [f"{name}: {plain}" if name else plain] if plain else []
    for key, item in value.items():
        if isinstance(item, dict):
            lines += _flat(f"{name}, {key}" if name else key, item)
    return lines
