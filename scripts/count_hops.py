"""Counts the files and hops between the flag and the optimizer, in one optimizer step of a run.

    python scripts/count_hops.py --config=configs/text.py:debug --config.steps=1 --config.warm_start.steps=0

Runs `fluxjax.train` with these flags in the working directory's tree, in a folder that is thrown away, and watches
every call of a Python function of the four packages by one in another of their files, whatever lies between the two
(JAX, flax, asyncio). A *file* counts if one of its functions was called from the parsing of the flags until the first
optimizer step is done; a *hop* is a pair of files (caller, called). `step` counts the same within `PolicyTrainer.train`
only. Functions that a dataclass generates are not seen, and what runs while a module is imported does not count: that
is its import's way, not the data's. With HOPS=--list the files, too.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import threading
from typing import Any

ROOT = pathlib.Path.cwd()
PACKAGES = tuple(f"{ROOT / package}{os.sep}" for package in ("fluxjax", "rollout", "models", "sharding"))


class Hops:
    def __init__(self) -> None:
        self.files: set[str] = set()
        self.pairs: set[tuple[str, str]] = set()
        self.calls = 0

    def add(self, caller: str | None, called: str) -> None:
        self.files.add(called)
        if caller is not None and caller != called:
            self.pairs.add((caller, called))
            self.calls += 1

    def line(self) -> str:
        return f"{len(self.files)} files, {len(self.pairs)} hops, {self.calls} calls from file to file"


def main(flags: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    whole, step = Hops(), Hops()
    names: dict[str, str | None] = {}
    within = threading.local()
    done = threading.Event()

    def ours(frame: Any) -> str | None:
        file = frame.f_code.co_filename
        if file not in names:
            names[file] = str(pathlib.Path(file).relative_to(ROOT)) if file.startswith(PACKAGES) else None
        return names[file]

    def record(frame: Any, event: str, _: Any) -> None:
        called = ours(frame)
        if called is None or event not in ("call", "return") or done.is_set():
            return
        training = frame.f_code.co_qualname == "PolicyTrainer.train"
        if event == "return":
            if training:
                done.set()
            return
        if training:
            within.step = True
        caller: str | None = None
        above = frame
        while above is not None:
            if above.f_code.co_name == "<module>" and above.f_globals["__name__"] != "__main__":
                return
            above = above.f_back
            if caller is None and above is not None:
                caller = ours(above)
        whole.add(caller, called)
        if getattr(within, "step", False):
            step.add(caller, called)

    from fluxjax import train

    with tempfile.TemporaryDirectory() as folder:
        run_flags = [*flags, f"--config.run_dir={folder}/run"]
        threading.setprofile(record)
        sys.setprofile(record)
        try:
            train.main(run_flags)
        except SystemExit:
            pass
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    for name, hops in (("flag to optimizer", whole), ("step", step)):
        print(f"{name}: {hops.line()}")
    if "--list" in os.environ.get("HOPS", ""):
        print(*sorted(whole.files), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
