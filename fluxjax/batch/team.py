"""The processes that train together, as training sees them: every process lays out its share of a step, one decides.

A process that is alone has the share of all; `hosts.gang.Gang` is a team of several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..algorithms.rl_algorithm import Key
from ..base.process import collector_paused
from ..base.types import Group, PreparedPrompt
from .composer import Composer
from .composition import Composition
from .fill import span_cells
from .share import Share

Minibatch: TypeAlias = tuple[Sequence[Group], Mapping[int, PreparedPrompt]]  # groups, and their prompts by draw
Arrays: TypeAlias = Mapping[str, np.ndarray]  # of one dimension
# (responses, one number a response by name) -> one number a response by name
OfResponses: TypeAlias = Callable[[Sequence[Key], Arrays], Arrays]
# (responses, the tokens of each, one number a token by name) -> one number a token by name
OfTokens: TypeAlias = Callable[[Sequence[Key], np.ndarray, Arrays], Arrays]


class Team:
    """A process that trains alone. The processes of a team call the same methods in the same order, but for `composed`,
    which is process 0's: the others call `laid_out` with the shares that it hands out."""

    processes = 1

    def composed(
        self,
        composer: Composer,
        minibatches: Sequence[Minibatch],
        *,
        size: int = 0,
        update: bool = True,
        **options: Any,
    ) -> list[Composition]:
        """Returns the share of this process, process 0, of each minibatch; `options` are those of `Composer.outline`.
        The other processes get their shares, with `size` and `update` (see `PolicyTrainer.follow`), and lay them out at
        the same time. After an error nothing can follow."""
        with collector_paused():
            with self.stage("plan"):
                steps = [composer.outline(groups, prepared, **options) for groups, prepared in minibatches]
                cut = [step.cut(self.processes) if self.processes > 1 else [step] for step in steps]
                self.hand_out([[shares[process] for shares in cut] for process in range(self.processes)], size, update)
            return self.laid_out(composer, [shares[0] for shares in cut])

    def laid_out(self, composer: Composer, shares: Sequence[Share]) -> list[Composition]:
        """Returns the microbatches of this process's shares, when all processes agree on the programs to run."""
        with self.stage("layout"):
            compositions = [composer.lay_out(share) for share in shares]
        self.agree(compositions)
        return compositions

    def stage(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measures a stage of the step."""
        return contextlib.nullcontext()

    def hand_out(self, shares: Sequence[Sequence[Share]], size: int, update: bool) -> None:
        """Sends every other process its shares, `shares[process]`, one of each minibatch."""

    def agree(self, compositions: Sequence[Composition]) -> None:
        """Returns when all processes are about to run the same programs."""

    def decided(self, value: Any, decide: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Calls `decide` in process 0, with the value of every process; returns this process's part of the result.
        Values are numbers, texts, arrays of one dimension, and lists and dictionaries of these."""
        return decide([value])[0]


ALONE = Team()


def by_response(
    team: Team, compositions: Sequence[Composition], sums: Sequence[Arrays], decide: OfResponses
) -> list[dict[str, np.ndarray]]:
    """Returns, for each composition, one number a response. Process 0 decides them, of the responses of all processes.

    `sums` has, for each composition, numbers of its responses, in which each token here has its part; `decide` gets
    their sums over all tokens. Responses of which no token is here get 0."""

    def of_tokens(keys: Sequence[Key], counts: np.ndarray, parts: Arrays) -> Arrays:
        which = np.repeat(np.arange(len(keys)), counts)
        totals = {name: np.bincount(which, values, len(keys)) for name, values in parts.items()}
        return {name: values[which] for name, values in decide(keys, totals).items()}

    here = [composition.lengths > 0 for composition in compositions]
    parts = [{name: values[some] for name, values in part.items()} for part, some in zip(sums, here, strict=True)]
    found = _decided(team, compositions, [some.astype(np.int64) for some in here], parts, of_tokens)
    result: list[dict[str, np.ndarray]] = [{} for _ in found]
    for some, part, numbers in zip(here, found, result, strict=True):
        for name, values in part.items():
            numbers[name] = np.zeros(len(some))
            numbers[name][some] = values
    return result


def by_token(
    team: Team, compositions: Sequence[Composition], values: Sequence[Arrays], decide: OfTokens
) -> list[dict[str, np.ndarray]]:
    """Returns, for each composition, one number a token, response after response. Process 0 decides them, of `values`
    in the same form: those of all tokens of the responses of all processes."""
    return _decided(team, compositions, [composition.lengths for composition in compositions], values, decide)


def _decided(
    team: Team,
    compositions: Sequence[Composition],
    counts: Sequence[np.ndarray],
    values: Sequence[Arrays],
    decide: OfTokens,
) -> list[dict[str, np.ndarray]]:
    """`counts` has the numbers of each response in the `values` of a composition."""
    every = np.concatenate(counts)
    keys = np.array([key for composition in compositions for key in composition.keys], np.int64).reshape(-1, 2)
    numbers = {name: np.concatenate([part[name] for part in values]) for name in values[0]}
    arrays = {"keys": keys[every > 0].reshape(-1), "counts": every[every > 0], **numbers}
    found = team.decided(arrays, lambda parts: _of_whole_responses(parts, decide))
    return _cut(found, [int(some.sum()) for some in counts])


def _of_whole_responses(parts: Sequence[Arrays], decide: OfTokens) -> list[dict[str, np.ndarray]]:
    """Joins what the processes have of each response, calls `decide`, and deals out its result. A process with a higher
    number has later tokens of a response."""
    number: dict[Key, int] = {}  # of each response
    keys = np.concatenate([part["keys"] for part in parts]).reshape(-1, 2).tolist()
    which = np.array([number.setdefault((draw, sample), len(number)) for draw, sample in keys], np.int64)
    counts = np.concatenate([part["counts"] for part in parts])
    order = np.argsort(which, kind="stable")
    cells, _ = span_cells((np.cumsum(counts) - counts)[order], counts[order])
    names = [name for name in parts[0] if name not in ("keys", "counts")]
    values = {name: np.concatenate([part[name] for part in parts])[cells] for name in names}
    lengths = np.zeros(len(number), np.int64)
    np.add.at(lengths, which, counts)
    back = np.empty_like(cells)
    back[cells] = np.arange(len(cells))
    found = {name: numbers[back] for name, numbers in decide(list(number), lengths, values).items()}
    return _cut(found, [int(part["counts"].sum()) for part in parts])


def _cut(arrays: Arrays, sizes: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Cuts arrays, one after the other, into parts of these sizes."""
    ends = np.cumsum(sizes)
    return [
        {name: array[end - size : end] for name, array in arrays.items()} for size, end in zip(sizes, ends, strict=True)
    ]
