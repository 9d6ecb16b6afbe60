"""Breaks the code in ways that were once not noticed, one after the other, and says whether the tests notice each.

    python tests/mutants.py                    every mutant of `tests/mutant_list.py`
    python tests/mutants.py --only barrier     those with this in their names
    python tests/mutants.py --draw 100         100 mutants of the coordinator that mutmut makes, drawn by --seed
    python tests/mutants.py --jobs 2           two at a time

Each mutant is written into a copy of the tree; the coordinator's tests run there until the first failure. A line a
mutant, then a summary; the status is 1 if one survives, if its old text is no longer where it was, or if tests fail
without a mutant. `--draw` needs mutmut 3, which may be in an environment of its own: `--mutmut PYTHON` names its
interpreter. `docs/mutants.md` explains survivors of the last draw.
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
FIRST = ("tests/coordinator/test_synchronous_rules.py", "tests/coordinator/test_promises.py")  # what finds most
LAST = (
    *("tests/simulation/test_promised_histories.py", "tests/simulation/test_reward_stage.py"),
    *("tests/test_schedules.py", "tests/test_views.py", "tests/rewards/test_code.py"),
)
COPIED = ("fluxjax", "models", "rollout", "sharding", "configs", "tests", "pyproject.toml")
FEWER_PASSES = "--xla_cpu_use_fusion_emitters=false"  # as in conftest.py, which would try it in a process of its own
MINUTES = 10  # after which a mutant that makes the tests hang counts as noticed
DRAW = pathlib.Path(__file__).parent / "mutmut_draw.py"


@dataclasses.dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    killer: str  # the test that failed, and why; empty: none did


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


def write(file: pathlib.Path, text: str) -> None:
    """Without what was compiled before: that is told apart by size and whole seconds only."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


class Worker:
    """A copy of the tree, and a process that runs tests in it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.tree = copy(folder)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": FEWER_PASSES,
            "MUTANTS_ROOT": str(ROOT),
            "COLUMNS": "300",
        }
        environment.pop("PYTHONPATH", None)
        command = [sys.executable, pathlib.Path(__file__).parent / "warm_pytest.py"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.tree
        )

    def tests(self, tests: Sequence[str]) -> tuple[int, str]:
        """Their status and output."""
        assert self.process.stdin is not None and self.process.stdout is not None
        arguments = ["-x", "-q", "--no-header", "-rfE", "-p", "no:cacheprovider", "--assert=plain", *tests]
        question = {"tree": str(self.tree), "arguments": arguments, "seconds": 60 * MINUTES}
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        return answer["status"], answer["output"]

    def run(self, mutant: Mutant) -> Outcome:
        """The tests with the mutant; the tree is then as it was."""
        file, text = self.tree / mutant.file, mutated(mutant, self.tree)
        before = file.read_text()
        try:
            write(file, text)
            status, output = 0, ""
            for tests in ordered(self.tree, mutant.file):
                status, output = self.tests(tests)
                if status:
                    break
        finally:
            write(file, before)
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if status and not failed:
            failed = [f"status {status}: {output[-300:].strip()}"]
        return Outcome(mutant, failed[0].removeprefix("FAILED ")[:300] if failed else "")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def subject(file: str) -> str:
    """What a file is about, as its tests are called."""
    path = pathlib.Path(file)
    return ("lengths" if path.parent.name == "lengths" else path.stem).partition("_")[0].rstrip("s")


def ordered(tree: pathlib.Path, file: str) -> list[list[str]]:
    """All tests in two parts, since to collect them takes time: what is likely to notice, then the rest."""
    stem = subject(file)
    every = sorted(tree.glob("tests/coordinator/test_*.py"), key=lambda test: test.name == "test_lengths.py")
    like = [test for test in every if test.name.startswith(f"test_{stem}")]
    first = dict.fromkeys([*like, *(tree / test for test in FIRST)])
    last = [test for test in [*every, *(tree / test for test in LAST)] if test not in first]
    return [[str(test.relative_to(tree)) for test in tests] for tests in (first, last)]


def run_all(mutants: Sequence[Mutant], jobs: int) -> int:
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        workers = [Worker(pathlib.Path(name) / str(job)) for job in range(jobs)]
        if wrong := without_mutants(workers[0]):
            print(f"error: without any mutant: {wrong}", file=sys.stderr)
            return 1
        free: queue.Queue[Worker] = queue.Queue()
        for worker in workers:
            free.put(worker)

        def outcome_of(mutant: Mutant) -> Outcome:
            worker = free.get()
            try:
                return worker.run(mutant)
            finally:
                free.put(worker)

        survivors = []
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for outcome in pool.map(outcome_of, mutants):
                print(f"{outcome.mutant.name}: {outcome.killer or 'SURVIVED'}", flush=True)
                survivors += [] if outcome.killer else [outcome.mutant]
        for worker in workers:
            worker.close()
    for mutant in survivors:
        print(f"\nsurvived: {mutant.name} ({mutant.file})\n- {mutant.old}\n+ {mutant.new}")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants noticed")
    return 1 if survivors else 0


def without_mutants(worker: Worker) -> str:
    """What fails in the code as it is; else every mutant would count as noticed."""
    status, output = worker.tests([test for tests in ordered(worker.tree, "none") for test in tests])
    return output[-300:] if status else ""


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
