"""Plans the two kinds of turn on the host, between turns (`rollout.device` carries them out).

A *start* prefills prompts and draws the first token of the samples that were given a slot; a *round* gives each
running sample up to `steps_per_sync` tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .buckets import doubling, geometric
from .prefill import LEAST_AREA, LEAST_TOKENS, Place, PrefillBatch, Prefix, plan
from .programs import DecodeRound, Starts
from .scheduler import RunningSample, Scheduler

SMALL_MODEL = 10**7  # weights: up to here a few rows cost as much as many, beyond it each row is computed at its price
LEAST_ROWS = 32  # samples of a start or a round, for a small model
LEAST_VIEW = 32  # cache entries read by a round


@dataclasses.dataclass(frozen=True)
class TurnLimits:
    slots: int
    max_sequence_tokens: int
    prefill_tokens: int
    prefill_patches: int
    merge_unit: int  # patches a feature of the vision tower; 1 for text
    small_model: bool = True  # rather fill up a batch than compile another shape

    @property
    def least_rows(self) -> int:
        return min(LEAST_ROWS, self.slots) if self.small_model else 1


@dataclasses.dataclass
class StartPlan:
    """Batches to prefill, and for each batch (these, or earlier ones that samples still waited for) its starts."""

    prefills: list[PrefillBatch]
    starts: list[tuple[PrefillBatch, np.ndarray, Starts]]


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    slots_B: np.ndarray
    batch: DecodeRound
    view_length: int


def plan_starts(scheduler: Scheduler, limits: TurnLimits) -> StartPlan:
    """Prefills for the jobs whose rows are missing, and starts for every sample with a slot and no cache.

    Rows are kept with a job as long as samples of it wait for a slot, so that a prompt is computed once.
    """
    jobs = scheduler.to_start()
    missing = [job for job in jobs if job.rows is None]
    wanted = [[s for s in job.samples if s in jobs[job] or s.waiting] for job in missing]
    prefixes = [
        Prefix(job.request.prompt, tuple(scheduler.response(s) for s in samples))
        for job, samples in zip(missing, wanted, strict=True)
    ]
    prefills: list[PrefillBatch] = []
    for members, batch in plan(
        prefixes,
        row_tokens=limits.max_sequence_tokens,
        batch_tokens=limits.prefill_tokens,
        batch_patches=limits.prefill_patches,
        merge_unit=limits.merge_unit,
        least_area=LEAST_AREA if limits.small_model else 1,
    ):
        prefills.append(batch)
        for i, places in zip(members, batch.places, strict=True):
            missing[i].rows = (batch, {s.index: place for s, place in zip(wanted[i], places, strict=True)})

    by_batch: dict[int, tuple[PrefillBatch, list[tuple[RunningSample, Place]]]] = {}
    for job, samples in jobs.items():
        batch, places = job.rows
        _, members = by_batch.setdefault(id(batch), (batch, []))
        members.extend((sample, places[sample.index]) for sample in samples)
        if not any(sample.waiting for sample in job.samples):
            job.rows = None
    return StartPlan(prefills, [_starts(scheduler, limits, batch, members) for batch, members in by_batch.values()])


def _starts(
    scheduler: Scheduler, limits: TurnLimits, batch: PrefillBatch, members: list[tuple[RunningSample, Place]]
) -> tuple[PrefillBatch, np.ndarray, Starts]:
    size = doubling(len(members), limits.least_rows, limits.slots)
    slots_B = np.array([sample.slot for sample, _ in members], np.int32)
    places = [(p.row, p.prompt_tokens, p.response_start, p.response_tokens) for _, p in members]
    row_B, prompt_B, start_B, response_B = np.pad(np.array(places, np.int32), ((0, size - len(places)), (0, 0))).T
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
    return batch, slots_B, starts


def plan_round(scheduler: Scheduler, limits: TurnLimits) -> RoundPlan:
    slots_B = scheduler.to_decode()
    batch = scheduler.table.round(slots_B, doubling(len(slots_B), limits.least_rows, limits.slots))
    view_length = doubling(int(batch.length_B.max()), LEAST_VIEW, limits.max_sequence_tokens)
    return RoundPlan(slots_B, batch, view_length)
