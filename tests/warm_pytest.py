"""Runs pytest again and again without importing JAX each time: `tests/mutants.py` starts it.

Reads lines of JSON, {"tree": folder, "arguments": [...], "seconds": limit}, and answers each by {"status", "output"}.
What is slow to import and never mutated is imported once; each run is a fork of that. JAX allows it as long as nothing
was computed, and no test of the coordinator computes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback

import hypothesis  # noqa: F401
import jax.numpy  # noqa: F401
import jaxtyping
import pytest

# Checks of types and shapes would take most of the time: tests of behaviour are to notice a mutant.
jaxtyping.install_import_hook = lambda *modules, **options: None


def child(tree: str, arguments: list[str], output: int) -> int:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    sys.path[:] = [tree, *(path for path in sys.path if path not in ("", os.environ["MUTANTS_ROOT"]))]
    try:
        return int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
        return 3


def run(tree: str, arguments: list[str], seconds: float) -> dict[str, object]:
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            os._exit(child(tree, arguments, output.fileno()))
        end = time.monotonic() + seconds
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return {"status": 124, "output": ""}
            time.sleep(0.05)
        output.seek(0)
        return {"status": os.waitstatus_to_exitcode(done[1]), "output": output.read()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
