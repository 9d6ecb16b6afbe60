"""Data walks forward from the composer to the optimizer: no file is entered again once its work was handed on.

One step of `PolicyTrainer.train` is recorded for every strategy: each call of a function in a file of `fluxjax/batch`
or `fluxjax/learner` from a function in another of these files, with everything between the two (sharding, JAX) left
out, so that a callback counts as a call. Between these files then holds:

- No file calls one that it was called by, directly or through others: the graph of calls has no cycle.
- A file that hands work on, so one that itself calls another file, is called from one file only, and each of its
  functions once a step. What is left are the files at the end of the walk: they compute something from what they are
  given, for whoever asks.

The composer is entered once by definition; so is the learner. What a dataclass generates has no file and is not seen.
"""

from __future__ import annotations

import graphlib
import pathlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from learner_cases import tiny
from packing_cases import MODEL, make_config, make_groups

import fluxjax
from fluxjax.algorithms import ALGORITHMS, grpo
from fluxjax.batch.composer import Composer
from fluxjax.config import FSDP, ODC, STRATEGIES, Ulysses
from fluxjax.learner.learner import Learner
from fluxjax.learner.policy_trainer import PolicyTrainer
from fluxjax.learner.run_models import RunModels
from sharding.mesh import make_mesh

ROOT = pathlib.Path(fluxjax.__file__).parent
ROOMS = {str(file): file.stem for room in ("batch", "learner") for file in (ROOT / room).glob("*.py")}
HEADS = (4, 2)
CONTENTS = [[10], [4, (1, 4, 4)], [9], [20]]
LENGTHS = [[110, 9], [20, 19], [14], [15, 2]]  # the first one fits no device alone


def calls_between_files(run: Callable[[], Any]) -> Counter[tuple[str, str, str]]:
    """How often a file of the rooms called another one, by (caller, called, function), in all threads."""
    found: Counter[tuple[str, str, str]] = Counter()

    def record(frame: Any, event: str, _: Any) -> None:
        called = ROOMS.get(frame.f_code.co_filename)
        if event != "call" or called is None or _resumed(frame):
            return
        caller = next((ROOMS[file] for file in _files_above(frame) if file in ROOMS), called)
        if caller != called:
            found[caller, called, frame.f_code.co_name] += 1

    before = sys.getprofile()
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return found


def _files_above(frame: Any) -> Iterator[str]:
    while (frame := frame.f_back) is not None:
        yield frame.f_code.co_filename


def _resumed(frame: Any) -> bool:
    """Whether a generator goes on: a generator expression that is handed to a function of another file."""
    return frame.f_code.co_name == "<genexpr>"


LONG = (FSDP, ODC, Ulysses)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=pytest.mark.long if s in LONG else ()) for s in STRATEGIES.values()]
)
def test_no_file_is_entered_again(strategy: type) -> None:
    config = make_config(tokens_per_row=160 if strategy is FSDP else 20, rows=4, patches=64)
    config.sharding.strategy = strategy()
    groups, prepared = make_groups(CONTENTS, LENGTHS)
    learner = Learner(config, tiny(HEADS), grpo.token_loss, mesh=make_mesh(4))
    learner.version = 9
    run_models = RunModels(config, ALGORITHMS["grpo"], learner)
    trainer = PolicyTrainer(config, run_models, Composer(config, 4, MODEL.vision, learner.text))
    before = jax.tree.leaves(learner.params)[0]
    calls = calls_between_files(lambda: trainer.train(1, groups, prepared))
    assert learner.version == 10 and jax.tree.leaves(learner.params)[0] is not before

    callers: dict[str, set[str]] = {}
    for caller, called, _ in calls:
        callers.setdefault(called, set()).add(caller)
    order = [*graphlib.TopologicalSorter(callers).static_order()]  # raises CycleError
    assert order[0] == "policy_trainer"
    hand_on = {caller for caller, _, _ in calls} - {"policy_trainer"}
    for file in hand_on:
        assert len(callers[file]) == 1, f"{file} is entered from {sorted(callers[file])}"
        for (_, called, function), count in calls.items():
            assert called != file or count == 1, f"{file}: {function} is called {count} times in a step"
    family = {FSDP: {"rows"}, ODC: {"own_pace", "spreading", "fill"}}
    assert {"composer", "learner"} | family.get(strategy, {"spreading", "fill"}) <= hand_on
