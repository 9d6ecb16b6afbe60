"""Gives the parts of `gpu_suite.py` their command line, what they import, and clocks."""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent
ROOT = BENCHMARKS.parent
# Before this folder: some parts have names of benchmarks. The last folder has the programs that tests run.
sys.path[:0] = [str(ROOT), str(BENCHMARKS), str(ROOT / "tests" / "sharding")]


class CheckError(AssertionError):
    """A figure is out of bounds. `figures` are all figures of its check."""

    def __init__(self, why: str, figures: Mapping[str, Any]) -> None:
        super().__init__(why)
        self.figures = figures


class Figures:
    """The figures of a part. All figures so far are printed whenever some are added: if the part is stopped, they are
    not lost."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self.failed = False

    def add(self, **figures: Any) -> None:
        self._known |= figures
        print(json.dumps(self._known), flush=True)

    def attempt(self, name: str, measure: Callable[[], Any]) -> None:
        """Adds what `measure` returns, or its error: a failure does not stop the other measurements."""
        try:
            self.add(**{name: measure()})
        except Exception as error:
            known = error.figures if isinstance(error, CheckError) else {}
            self.add(**{name: {**known, "error": f"{type(error).__name__}: {error}"[:500]}})
            self.failed = True
            traceback.print_exc()


def main(measure: Callable[[Figures, bool], None], about: str | None) -> int:
    """Calls `measure(figures, dry)` as the command line says. Returns 1 if an attempt failed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="at tiny shapes, for a CPU")
    options = parser.parse_args()
    figures = Figures()
    measure(figures, options.dry)
    return int(figures.failed)


def seconds(run: Callable[[], object], wait: Callable[[object], object], calls: int, repeats: int = 3) -> float:
    """The seconds of a call if `calls` are started one after another and only the last is waited for: the median of
    `repeats` such series, after one call that compiles."""
    wait(run())
    rows = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            result = run()
        wait(result)
        rows.append((time.perf_counter() - started) / calls)
    return statistics.median(rows)


def rounded(figures: Mapping[str, float], digits: int = 4) -> dict[str, float]:
    """The figures, rounded to `digits` significant digits."""
    return {name: float(f"{value:.{digits}g}") for name, value in figures.items()}
