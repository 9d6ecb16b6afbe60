"""`python -m tests.fuzz serve|flight|links|agent|checkpoint --count N --seed S`: hostile or damaged input of one kind.

Draw number `i` has the seed `S + i`. What failed is printed with its seed, by which `--count 1` repeats it; the exit
code is 1 then.
"""

import argparse
import importlib
import os
import pathlib
import sys
import time

KINDS = ("serve", "flight", "links", "agent", "checkpoint")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fluxjax" / "xla-tests"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))  # as tests/conftest.py
    tests = pathlib.Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tests), str(tests / "rollout"), str(tests.parent)]
    began = time.monotonic()
    failures = importlib.import_module(f"fuzz.{options.kind}").run(options.count, options.seed)
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{options.kind}: {options.count} draws, {len(failures)} failed, {time.monotonic() - began:.0f} s")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
