"""Prints counts of the code, each beside its budget; `--check` exits 1 and names the budgets that are broken.

    python scripts/budgets.py [--check]

core lines              lines of all Python files of the four packages: fluxjax, models, sharding, rollout
settings                fields that are no section themselves, of every dataclass that `Config` reaches through unions,
                        lists and dictionaries (a field's metadata "entries" may name the class of its entries); each
                        class once
files that a run imports
                        files of the four packages among the modules of a process that has run `configs/text.py` on one
                        device from the flags to the end of the run
files, pairs of a step  files with a function that is called within `PolicyTrainer.train`; their pairs (caller, called)
files, pairs from flag to optimizer
                        the same from the parsing of the flags until the first optimizer step is done

The caller of a function is the function of the four packages that reaches it, whatever lies between the two (JAX, flax,
asyncio). Functions that a dataclass generates are not counted, nor are calls while a module is imported: they belong to
the import, not to the data's way. The run has one optimizer step and no warm start, in a process of its own and a
temporary folder:

    python scripts/budgets.py --run --config=configs/text.py:debug --config.steps=1 --config.warm_start.steps=0

prints the counts of a run with these flags, and the names of the files, as JSON.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORE = ("fluxjax", "models", "sharding", "rollout")
PACKAGES = tuple(f"{ROOT / package}{os.sep}" for package in CORE)
FLAGS = ["--config=configs/text.py:debug", "--config.steps=1", "--config.warm_start.steps=0"]
BUDGETS = {
    # 50,000; 2,500 for Qwen3-VL and Qwen3.5; 800 for the engine and the step on a GPU; 3,000 for episodes
    "core lines": 56_300,
    # 130; 10 limits of environments, three of a source, the discount of turns
    "settings": 144,
    "files that a run imports": 200,
    "files of a step": 25,
    "pairs of a step": 40,
    "files from flag to optimizer": 80,
}
SHORT = 20  # lines of a function


class Calls:
    """The files whose functions were called, and the pairs (caller, called) of these files."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.pairs: set[tuple[str, str]] = set()

    def add(self, caller: str | None, called: str) -> None:
        self.files.add(called)
        if caller is not None and caller != called:
            self.pairs.add((caller, called))


class Watch:
    """Watches a run by Python's profiling hook, in all threads, until its first optimizer step is done."""

    def __init__(self) -> None:
        self.run, self.step = Calls(), Calls()
        self._names: dict[str, str | None] = {}
        self._within, self._done = threading.local(), threading.Event()

    def __enter__(self) -> Watch:
        threading.setprofile(self._record)
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]

    def _core_file(self, frame: Any) -> str | None:
        file = frame.f_code.co_filename
        if file not in self._names:
            self._names[file] = str(pathlib.Path(file).relative_to(ROOT)) if file.startswith(PACKAGES) else None
        return self._names[file]

    def _record(self, frame: Any, event: str, _: Any) -> None:
        called = self._core_file(frame)
        if called is None or event not in ("call", "return") or self._done.is_set():
            return
        training = frame.f_code.co_qualname == "PolicyTrainer.train"
        if event == "return":
            if training:
                self._done.set()
            return
        if training:
            self._within.step = True
        caller: str | None = None
        above = frame
        while above is not None:
            if above.f_code.co_name == "<module>" and above.f_globals["__name__"] != "__main__":
                return  # a module is being imported
            above = above.f_back
            if caller is None and above is not None:
                caller = self._core_file(above)
        self.run.add(caller, called)
        if getattr(self._within, "step", False):
            self.step.add(caller, called)


def watched_run(flags: list[str]) -> dict[str, Any]:
    """Runs `fluxjax.train` with these flags in this process. Returns the counts, and the files that were imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    from fluxjax import train

    with tempfile.TemporaryDirectory() as folder, Watch() as watch:
        status = train.main([*flags, f"--config.run_dir={folder}/run"])
    if status:
        raise SystemExit(f"the run ended with status {status}")
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    imported = sorted({str(pathlib.Path(file).relative_to(ROOT)) for file in files if file.startswith(PACKAGES)})
    return {
        "imported": imported,
        "called": sorted(watch.run.files),
        "pairs within a step": sorted(watch.step.pairs),
        "files that a run imports": len(imported),
        "files of a step": len(watch.step.files),
        "pairs of a step": len(watch.step.pairs),
        "files from flag to optimizer": len(watch.run.files),
        "pairs from flag to optimizer": len(watch.run.pairs),
    }


def run_in_a_process(flags: list[str] = FLAGS) -> dict[str, Any]:
    """Returns `watched_run` of a new process that has imported nothing else."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    command = [sys.executable, __file__, "--run", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def settings() -> int:
    """Returns the number of settings."""
    sys.path.insert(0, str(ROOT))
    from fluxjax.config import Config

    sections: list[type] = [Config]
    count = 0
    for section in sections:  # the list grows
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            found = [*_sections(hints[field.name]), *_sections(field.metadata.get("entries"))]
            count += not found
            sections += [kind for kind in dict.fromkeys(found) if kind not in sections]
    return count


def _sections(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and dataclasses.is_dataclass(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from _sections(argument)


def lines(files: Iterable[pathlib.Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def share_of_short_functions(files: Iterable[pathlib.Path]) -> float:
    """Returns the share of functions that have fewer than `SHORT` lines, including decorators and docstring."""
    lengths = [
        (node.end_lineno or 0) - node.lineno + 1
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sum(length < SHORT for length in lengths) / len(lengths)


def counted() -> dict[str, Any]:
    core = [file for package in CORE for file in sorted((ROOT / package).rglob("*.py"))]
    counts: dict[str, Any] = {"core lines": lines(core), "settings": settings()}
    run = run_in_a_process()
    counts |= {name: count for name, count in run.items() if isinstance(count, int)}
    counts["functions below 20 lines, %"] = round(100 * share_of_short_functions(core), 1)
    counts["test lines a core line"] = round(lines((ROOT / "tests").rglob("*.py")) / counts["core lines"], 2)
    counts["lines of docs/structure.md"] = lines([ROOT / "docs" / "structure.md"])
    return counts


def broken(counts: Mapping[str, Any]) -> list[str]:
    """Returns a line for each budget that the counts exceed."""
    return [f"{name}: {counts[name]}, more than {most}" for name, most in BUDGETS.items() if counts[name] > most]


def main(arguments: list[str]) -> int:
    if "--run" in arguments:
        print(json.dumps(watched_run([argument for argument in arguments if argument != "--run"])))
        return 0
    counts = counted()
    for name, count in counts.items():
        print(f"{name:32} {count:>8}" + (f"  of {BUDGETS[name]}" if name in BUDGETS else ""))
    exceeded = broken(counts)
    print(*(f"broken: {line}" for line in exceeded), sep="\n", end="\n" if exceeded else "")
    return int("--check" in arguments and bool(exceeded))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
