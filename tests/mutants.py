"""Breaks the code in ways that were once not noticed, one after the other, and says whether the tests notice each.

    python tests/mutants.py                    every mutant of `tests/mutant_list.py`
    python tests/mutants.py --only barrier     those with this in their names
    python tests/mutants.py --draw 100         100 mutants of the coordinator that mutmut makes, drawn by --seed
    python tests/mutants.py --jobs 2           two at a time

Each mutant is written into a copy of the tree; `TESTS` run there until the first failure. A line a mutant, then a
summary; the status is 1 if one survives, or if its old text is no longer where it was. `--draw` needs mutmut 3, which
may be in an environment of its own: `--mutmut PYTHON` names its interpreter. `docs/mutants.md` explains the survivors of
the last draw.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from mutant_list import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = [  # after those that are named like the file: what finds most comes first
    *("tests/coordinator/test_synchronous_rules.py", "tests/coordinator/test_promises.py"),
    *("tests/coordinator", "tests/test_schedules.py", "tests/simulation/test_promised_histories.py"),
]
COPIED = ("fluxjax", "models", "rollout", "sharding", "configs", "tests", "pyproject.toml")
MINUTES = 10  # after which a mutant that makes the tests hang counts as noticed
DRAW = pathlib.Path(__file__).parent / "mutmut_draw.py"


@dataclasses.dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    killer: str  # the test that failed; empty: none did


def mutated(mutant: Mutant, root: pathlib.Path) -> str:
    """The text of its file with the mutant in it. Raises ValueError if its old text is not there exactly once."""
    text = (root / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: its old text is {text.count(mutant.old)} times in {mutant.file}; mend the list"
        )
    return text.replace(mutant.old, mutant.new)


def copy(folder: pathlib.Path) -> pathlib.Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def named_like(tree: pathlib.Path, file: str) -> list[str]:
    stem = pathlib.Path(file).stem.partition("_")[0].rstrip("s")
    return [str(test.relative_to(tree)) for test in sorted(tree.glob(f"tests/coordinator/test_{stem}*.py"))]


def run(mutant: Mutant, tree: pathlib.Path) -> Outcome:
    """Runs the tests in a copy of the tree, and leaves that as it was."""
    file, text = tree / mutant.file, mutated(mutant, tree)
    before = file.read_text()
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += [*named_like(tree, mutant.file), *TESTS]
    try:
        file.write_text(text)
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        return Outcome(mutant, f"no end within {MINUTES} minutes")
    finally:
        file.write_text(before)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode > 1 and not failed:
        failed = [f"status {done.returncode}: {(done.stdout + done.stderr)[-300:]}"]
    return Outcome(mutant, failed[0].removeprefix("FAILED ").partition(" - ")[0] if failed else "")


def run_all(mutants: Sequence[Mutant], jobs: int) -> int:
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        trees: queue.Queue[pathlib.Path] = queue.Queue()
        for job in range(jobs):
            trees.put(copy(pathlib.Path(name) / str(job)))

        def one(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                return run(mutant, tree)
            finally:
                trees.put(tree)

        survivors = []
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for outcome in pool.map(one, mutants):
                print(f"{outcome.mutant.name}: {outcome.killer or 'SURVIVED'}", flush=True)
                survivors += [] if outcome.killer else [outcome.mutant]
    for mutant in survivors:
        print(f"\nsurvived: {mutant.name} ({mutant.file})\n- {mutant.old}\n+ {mutant.new}")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants noticed")
    return 1 if survivors else 0


def drawn(count: int, seed: int, python: str) -> list[Mutant]:
    done = subprocess.run([python, DRAW, str(count), str(seed)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{python} {DRAW.name}: {done.stderr.strip().splitlines()[-1]}; install mutmut there")
    return [Mutant(**one) for one in json.loads(done.stdout)]


def main(argv: list[str]) -> int:
    """0; 1 if a mutant survives or is no longer possible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of their names")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--draw", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutmut", default=sys.executable, metavar="PYTHON")
    options = parser.parse_args(argv)
    try:
        mutants = drawn(options.draw, options.seed, options.mutmut) if options.draw else MUTANTS
        chosen = [mutant for mutant in mutants if options.only in mutant.name]
        for mutant in chosen:
            mutated(mutant, ROOT)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return run_all(chosen, options.jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
