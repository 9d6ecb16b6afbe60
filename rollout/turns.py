"""Plans the two kinds of turn on the host, between turns (`rollout.device` carries them out).

A *start* prefills prompts and draws the first token of the samples that were given a slot; a *round* gives each
running sample up to `steps_per_sync` tokens. Samples share the computation of their prompt whether they start, are
continued, or must be recomputed because the weights changed.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jax import Array

from models.inputs import ModelInput, PackedTokens, VisionInput
from models.processing.vision_input import concatenate, pad

from .programs import DecodeRound, Rows, Starts, doubling, geometric
from .requests import EngineLimits
from .scheduler import RunningSample, Scheduler

SMALL_MODEL = 10**7  # weights: up to here a few rows cost as much as many, beyond it each row is computed at its price
LEAST_ROWS = 32  # samples of a start or a round, for a small model
LEAST_VIEW = 32  # cache entries read by a round
LEAST_TOKENS = 16  # a row of a prefill
LEAST_AREA = 256  # rows x row length: for a small model less costs hardly less, and would be more shapes to compile
LEAST_FEATURES = 16  # features of the vision tower
PREFILL_TOKENS = PREFILL_PATCHES = 4096  # of one prefill, unless a single prompt has more


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prompt to prefill, and the tokens that each of its samples already has (may be none), in sample order."""

    prompt: ModelInput
    responses: tuple[np.ndarray, ...]


class Place(NamedTuple):
    """The place of a sample's cache entries: the row of the batch, and the tokens of its response in that row."""

    row: int
    prompt_tokens: int
    response_start: int
    response_tokens: int


@dataclasses.dataclass(eq=False)
class PrefillBatch:
    """One call of the prefill program; `places[i][j]` is sample `j` of prefix `i`. The engine fills in `outputs`:
    keys and values, and hidden states, on the device."""

    inputs: PackedTokens
    places: list[list[Place]]
    tokens: int  # computed, padding not counted
    outputs: tuple[Rows, Array] | None = None


# The batches that samples start from, each with the samples' slots and what the program needs. A batch that has no
# `outputs` yet is prefilled first; one that has was prefilled in an earlier turn.
StartPlan: TypeAlias = list[tuple[PrefillBatch, np.ndarray, Starts]]
RoundPlan: TypeAlias = tuple[np.ndarray, DecodeRound, int]  # slots, what the program needs, cache entries that it reads


def plan_starts(scheduler: Scheduler, limits: EngineLimits) -> StartPlan:
    """Starts every sample with a slot and no cache, and packs the prompts whose rows are missing.

    Samples that wait for a slot get their places, too, so that a prompt is computed once.
    """
    jobs = scheduler.to_start()
    wanted = [
        [sample for sample in job.samples if sample in samples or sample.waiting]
        for job, samples in jobs.items()
        if samples[0].place is None
    ]
    prefixes = [Prefix(samples[0].job.request.prompt, tuple(map(scheduler.response, samples))) for samples in wanted]
    for members, batch in plan(
        prefixes,
        row_tokens=limits.max_sequence_tokens,
        batch_tokens=PREFILL_TOKENS,
        batch_patches=PREFILL_PATCHES,
        merge_unit=1 if limits.vision is None else limits.vision.merge_unit,
        least_area=LEAST_AREA if limits.small_model else 1,
    ):
        for i, places in zip(members, batch.places, strict=True):
            for sample, place in zip(wanted[i], places, strict=True):
                sample.place = batch, place

    by_batch: dict[PrefillBatch, list[RunningSample]] = {}
    for sample in itertools.chain(*jobs.values()):
        by_batch.setdefault(sample.place[0], []).append(sample)
    return [(batch, *_starts(scheduler, limits, batch, samples)) for batch, samples in by_batch.items()]


def _starts(
    scheduler: Scheduler, limits: EngineLimits, batch: PrefillBatch, samples: list[RunningSample]
) -> tuple[np.ndarray, Starts]:
    size = doubling(len(samples), _least_rows(limits), limits.slots)
    slots_B = np.array([sample.slot for sample in samples], np.int32)
    places = np.array([sample.place[1] for sample in samples], np.int32)
    for sample in samples:
        sample.place = None
    row_B, prompt_B, start_B, response_B = np.pad(places, ((0, size - len(places)), (0, 0))).T
    entries_B = prompt_B + response_B
    row_tokens = batch.inputs.tokens_BT.shape[1]
    entry_T = np.arange(min(geometric(int(entries_B.max()), LEAST_TOKENS), row_tokens), dtype=np.int32)
    source_BT = np.where(entry_T < prompt_B[:, None], entry_T, entry_T + (start_B - prompt_B)[:, None])
    starts = Starts(
        slots_B=np.pad(slots_B, (0, size - len(slots_B)), constant_values=limits.slots),
        row_B=row_B,
        source_BT=np.minimum(source_BT, row_tokens - 1),
        last_B=np.where(response_B > 0, start_B + response_B, prompt_B) - (entries_B > 0),
        index_B=response_B,
        sampling=scheduler.table.sampling(slots_B, size),
    )
    return slots_B, starts


def plan_round(scheduler: Scheduler, limits: EngineLimits) -> RoundPlan:
    slots_B = scheduler.to_decode()
    batch = scheduler.table.round(slots_B, doubling(len(slots_B), _least_rows(limits), limits.slots))
    view_length = doubling(int(batch.length_B.max()), LEAST_VIEW, limits.max_sequence_tokens)
    return slots_B, batch, view_length


def _least_rows(limits: EngineLimits) -> int:
    return min(LEAST_ROWS, limits.slots) if limits.small_model else 1


def _layout(prefix: Prefix, row_tokens: int) -> tuple[list[int], list[Place]]:
    """Lengths of the prefix's rows, and places counted from its first row. Samples fill a row up to `row_tokens`."""
    start = len(prefix.prompt)
    lengths, places = [start], []
    for response in prefix.responses:
        if lengths[-1] + len(response) > row_tokens and lengths[-1] > start:
            lengths.append(start)
        places.append(Place(len(lengths) - 1, start, lengths[-1], len(response)))
        lengths[-1] += len(response)
    return lengths, places


def _shape(rows: int, longest: int, least_area: int) -> tuple[int, int]:
    """Rows and row length of a batch, rounded up."""
    T = geometric(longest, LEAST_TOKENS)
    return doubling(rows, max(1, least_area // doubling(T, 1))), T


def plan(
    prefixes: Sequence[Prefix],
    *,
    row_tokens: int,
    batch_tokens: int,
    batch_patches: int,
    merge_unit: int,
    least_area: int = LEAST_AREA,
) -> Iterator[tuple[list[int], PrefillBatch]]:
    """Packs prefixes, in order, into batches of about `batch_tokens` (rows x row length) and `batch_patches`.

    Yields the indices of the prefixes in a batch and the batch. A row is a prompt followed by what its samples already
    have, each as a branch (`models.inputs.PackedTokens`). A prefix is never divided between batches, so one of any size
    gets a batch of its own. `merge_unit` patches make a feature. Batches are filled up to `least_area`.
    """
    members: list[int] = []
    rows = longest = patches = 0
    for index, prefix in enumerate(prefixes):
        lengths, _ = _layout(prefix, row_tokens)
        more = prefix.prompt.vision.num_patches if prefix.prompt.vision is not None else 0
        B, T = _shape(rows + len(lengths), max(longest, *lengths), least_area)
        if members and (batch_tokens < B * T or patches + more > batch_patches):
            yield members, _pack([prefixes[i] for i in members], row_tokens, merge_unit, least_area)
            members, rows, longest, patches = [], 0, 0, 0
        members.append(index)
        rows, longest, patches = rows + len(lengths), max(longest, *lengths), patches + more
    if members:
        yield members, _pack([prefixes[i] for i in members], row_tokens, merge_unit, least_area)


def _pack(prefixes: Sequence[Prefix], row_tokens: int, merge_unit: int, least_area: int) -> PrefillBatch:
    layouts = [_layout(prefix, row_tokens) for prefix in prefixes]
    lengths = [length for row_lengths, _ in layouts for length in row_lengths]
    B, T = _shape(len(lengths), max(lengths), least_area)
    tokens_BT, segments_BT, branches_BT = np.zeros((3, B, T), np.int32)
    positions_3BT = np.zeros((3, B, T), np.int32)
    feature_index_BT = np.full((B, T), -1, np.int32)
    visions: list[VisionInput] = []
    places: list[list[Place]] = []
    row = features = 0
    for prefix, (row_lengths, relative_places) in zip(prefixes, layouts, strict=True):
        prompt, end = prefix.prompt, row + len(row_lengths)
        P = len(prompt)
        tokens_BT[row:end, :P] = prompt.token_ids_T
        positions_3BT[:, row:end, :P] = prompt.positions_3T[:, None]
        index = prompt.feature_index_T
        feature_index_BT[row:end, :P] = np.where(index >= 0, index + features, -1)
        for r, length in enumerate(row_lengths, start=row):
            segments_BT[r, :length] = 1
        places.append([place._replace(row=row + place.row) for place in relative_places])
        for branch, (place, response) in enumerate(zip(places[-1], prefix.responses, strict=True), start=1):
            columns = slice(place.response_start, place.response_start + place.response_tokens)
            tokens_BT[place.row, columns] = response
            branches_BT[place.row, columns] = branch
            positions_3BT[:, place.row, columns] = prompt.next_position + np.arange(len(response), dtype=np.int32)
        if prompt.vision is not None:
            visions.append(prompt.vision)
            features += prompt.vision.num_patches // merge_unit
        row = end
    predecessor_BT = np.broadcast_to(np.maximum(np.arange(T, dtype=np.int32) - 1, 0), (B, T))  # not used here
    vision = None
    if visions:
        joined = concatenate(visions)
        vision = pad(joined, merge_unit * geometric(joined.num_patches // merge_unit, LEAST_FEATURES))
    inputs = PackedTokens(tokens_BT, segments_BT, branches_BT, positions_3BT, predecessor_BT, feature_index_BT, vision)
    return PrefillBatch(inputs, places, sum(lengths))
