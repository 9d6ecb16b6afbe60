"""Runs a part of `gpu_suite.py` as a process: environment, time limit, and the last JSON line that it printed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

PARTS = pathlib.Path(__file__).resolve().parent
ROOT = PARTS.parent.parent
TRY_FLAGS = "import jax; jax.devices()"  # XLA aborts the process if it does not know a flag


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a part. A part that was stopped may have both figures and an error."""

    seconds: float
    figures: dict[str, Any] | None  # the last JSON object that it printed
    error: str  # empty if it ended well


def stop_on_signals() -> None:
    """Makes a signal that ends the suite end the running part, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def install(wheels: pathlib.Path, packages: pathlib.Path) -> pathlib.Path:
    """Installs all wheels of a folder, without their dependencies, into the folder `packages`, which it returns."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", packages, *sorted(wheels.glob("*.whl"))], check=True)
    return packages


def environment(folder: pathlib.Path, packages: pathlib.Path | None, *, dry: bool) -> dict[str, str]:
    """The environment of all parts. JAX keeps compiled programs and the results of autotuning in `folder/cache`."""
    path = [str(place) for place in (packages, ROOT, os.environ.get("PYTHONPATH")) if place]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    if dry:
        return found | {"JAX_PLATFORMS": "cpu"}
    found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.92"
    found["JAX_COMPILATION_CACHE_DIR"] = str((folder / "cache").resolve())
    return found


def with_flags(environment: dict[str, str], flags: Sequence[str]) -> dict[str, str]:
    """The environment with those of the XLA `flags` that the installed XLA knows."""
    found = dict(environment)
    for flag in flags:
        together = f"{found.get('XLA_FLAGS', '')} {flag}".strip()
        attempt = found | {"XLA_FLAGS": together, "JAX_PLATFORMS": "cpu"}
        if subprocess.run([sys.executable, "-c", TRY_FLAGS], env=attempt, capture_output=True).returncode:
            print(f"left out, for this XLA does not know it: {flag}", file=sys.stderr)
        else:
            found["XLA_FLAGS"] = together
    return found


def run(
    name: str, limit: float, environment: dict[str, str], logs: pathlib.Path, *, dry: bool, script: str = ""
) -> Ended:
    """Runs a part for at most `limit` seconds: the script of its own name, unless `script` is given. Its output goes to
    `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    out, err = logs / f"{name}.out", logs / f"{name}.err"
    path = PARTS / f"{script or name}.py"
    if not path.exists():
        return Ended(0.0, None, f"{path.relative_to(ROOT)} does not exist")
    command = [sys.executable, str(path), *(["--dry"] if dry else [])]
    started = time.monotonic()
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            status = process.wait(limit)
            error = f"status {status}: {_tail(err)}" if status else ""
        except subprocess.TimeoutExpired:
            error = f"stopped after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # with its child processes
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - started
    figures = _last_object(out)
    if figures is None and not error:
        error = "it printed no figures"
    return Ended(round(seconds, 1), figures, error)


def _tail(path: pathlib.Path) -> str:
    return "\n".join(path.read_text(errors="replace").strip().splitlines()[-8:])


def _last_object(path: pathlib.Path) -> dict[str, Any] | None:
    """The last line that is a JSON object: an incomplete line may follow if the part was stopped."""
    for line in reversed(path.read_text(errors="replace").splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(found := json.loads(line), dict):
                return found
    return None
