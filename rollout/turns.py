"""Plans the two kinds of turn (`rollout.jax_engine`) on the host; `rollout.device` runs them.

Samples that start together share the computation of their prompt.

A prompt, or a prompt with its response so far, is computed in chunks if it is longer than `CHUNK_TOKENS`. A chunk is
written to pages. Later chunks attend to these pages, and so do samples that start later than other samples of the
prompt. If a prompt has at most `PREFILL_PATCHES` patches, the prefill program computes all their features. No chunk
then ends before the last image or video of the prompt ends. A prompt with more patches is cut anywhere, and the tower
computes groups of frame pairs when chunks need them (`rollout.prompt_pixels`).

If layers have states (`EngineLimits.recurrent`), a prefill can't continue from pages of a prompt alone. A chunk leaves
its state in the slots of all samples that go on from it. One chunk ends at the last page boundary before the prompt's
last token, where the samples part. A sample whose slot has no state is computed from its first token, as after
preemption. A row of a prefill has tokens of one response at most, so that the row ends with the state of its
samples.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from jax import Array

from models.inputs import ModelInput, PackedTokens, VisionInput, concatenate, pad
from models.shadow import ShadowTensor
from sharding.kernels.runs import chunk_size, packed_runs

from .cache import Context, PageWrites, Rows
from .in_flight import Job, RunningSample
from .programs import Starts
from .requests import EngineLimits
from .scheduler import CHUNK_TOKENS, PREFILL_TOKENS, Scheduler
from .slots import PAGE_TOKENS, DecodeRound, doubling, geometric, pages_for

if TYPE_CHECKING:
    from .prompt_pixels import FeatureWork

SMALL_MODEL = 10**7  # a model with at most this number of weights is small: few rows cost as much as many
LEAST_ROWS = 32  # least rows of a start or a round, for a small model
LEAST_CONTEXT = 32  # least cache entries that a chunk reads
LEAST_TOKENS = 16  # least tokens of a row of a prefill
LEAST_AREA = 256  # least area (rows x row length) of a prefill of a small model; smaller areas save hardly any time
PREFILL_PATCHES = 4096  # most patches of one program, unless a single frame pair has more


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prompt to prefill, or the rest of a prompt whose beginning is in the pages `context`. `responses` has the
    tokens of each sample so far, in sample order. With `features`, the prompt's pixels are in no batch."""

    prompt: ModelInput
    responses: tuple[np.ndarray, ...]
    context: tuple[int, ...] = ()
    slot: int = 0  # the slot that has the state behind the context
    rid: str = ""
    features: FeatureWork | None = None


class Place(NamedTuple):
    """The position of a sample's cache entries in a batch: a row, and the columns of prompt and response in this row.
    The first `skip` entries are in the cache and in no row."""

    row: int
    prompt_tokens: int
    response_start: int
    response_tokens: int
    skip: int = 0


@dataclasses.dataclass(eq=False)
class PrefillBatch:
    """One call of the prefill program. `places[i][j]` is the place of sample `j` of prefix `i`. The engine fills in
    `outputs`: keys, values and hidden states on the device. Then the engine drops `features`."""

    inputs: PackedTokens
    places: list[list[Place]]
    tokens: int  # computed tokens, without padding
    context: Context | None = None
    shown: tuple[tuple[str, int, int], ...] = ()  # (rid of a request, the first of its patches, the patch behind them)
    features: FeatureWork | None = None  # of the batch's only prompt
    outputs: tuple[Rows, Array] | None = None

    def pixels(self) -> Iterator[ShadowTensor]:
        """The patches that must be fetched, in the order of their use."""
        if self.features is not None:
            tensors = map(self.features.kept.patches, self.features.groups)
            yield from (tensor for tensor in tensors if isinstance(tensor, ShadowTensor))
        elif self.inputs.vision is not None and isinstance(patches_PX := self.inputs.vision.patches_PX, ShadowTensor):
            yield from (patches_PX[start:stop] for _, start, stop in self.shown)


@dataclasses.dataclass(frozen=True)
class StartStep:
    """A batch to prefill, or a batch that has `outputs` from an earlier turn. Rows of the batch are copied to pages;
    then the samples in `slots_B` start from the batch. No sample starts from a chunk."""

    batch: PrefillBatch
    writes: PageWrites
    slots_B: np.ndarray
    starts: Starts | None = None


StartPlan: TypeAlias = list[StartStep]  # in order: a step may read pages that an earlier step fills
RoundPlan: TypeAlias = tuple[np.ndarray, DecodeRound]  # (slots, input of the decode program)


def plan_starts(scheduler: Scheduler) -> StartPlan:
    """Plans the starts of all samples of this turn: packs prompts whose rows are not computed, or plans their
    next chunks. Samples that wait for pages get rows, too, so that a prompt is computed once."""
    jobs = scheduler.starting
    steps: StartPlan = []
    wanted: list[tuple[Prefix, list[RunningSample]]] = []
    ready: list[RunningSample] = []
    for job, samples in jobs.items():
        ready += [sample for sample in samples if sample.place is not None]
        missing = [sample for sample in samples if sample.place is None]
        if missing:
            chunks, prefixes = _cut(scheduler, job, missing)
            steps += chunks
            wanted += prefixes
    for behind in (False, True):  # rows with a context run in another program
        group = [(prefix, samples) for prefix, samples in wanted if bool(prefix.context) is behind]
        prefixes = [prefix for prefix, _ in group]
        for members, batch in plan(prefixes, scheduler.limits, PREFILL_TOKENS, PREFILL_PATCHES):
            for i, places in zip(members, batch.places, strict=True):
                for sample, place in zip(group[i][1], places, strict=True):
                    sample.place = batch, place
    started = {id(sample) for samples in jobs.values() for sample in samples}
    ready += [sample for _, samples in wanted for sample in samples if id(sample) in started]

    by_batch: dict[PrefillBatch, list[RunningSample]] = {}
    for sample in sorted(ready, key=lambda sample: sample.slot):
        by_batch.setdefault(sample.place[0], []).append(sample)
    return steps + [_start(scheduler, batch, samples) for batch, samples in by_batch.items()]


def _cut(
    scheduler: Scheduler, job: Job, samples: list[RunningSample]
) -> tuple[StartPlan, list[tuple[Prefix, list[RunningSample]]]]:
    """The next chunks of a job's samples, and the prefixes that can start without a chunk, with their samples."""
    prompt, chunks = job.prompt, []
    P, media = len(prompt), _media_end(prompt, _grouped(scheduler, job))
    rid, fork = job.request.rid, _last_boundary(prompt)
    alone: list[tuple[Prefix, list[RunningSample]]] = []
    together: list[RunningSample] = []
    for sample in samples:
        done, end = scheduler.computed(sample), P + scheduler.response_tokens(sample)
        if stop := _chunk_end(scheduler, sample, media):
            next_part = part(prompt, scheduler.response(sample), done, stop)
            chunks.append(_chunk(scheduler, sample, next_part))
            if job.filled < len(job.pages) * PAGE_TOKENS or (scheduler.limits.recurrent and stop <= fork):
                break  # other samples continue when the prompt is computed
        elif done > (fork if scheduler.limits.recurrent else job.filled):
            context = tuple(sample.pages[: done // PAGE_TOKENS])
            last = part(prompt, scheduler.response(sample), done, end)
            features = _features(scheduler, job, last, end)
            prefix = Prefix(last, (np.zeros(0, np.int32),), context, scheduler.state_row(sample), rid, features)
            alone.append((prefix, [sample]))
        elif not together or scheduler.computed(together[0]) == done:  # samples with another state start later
            together.append(sample)
    if not together:
        return chunks, alone
    # At least one token is computed, since the next token is sampled from its hidden state.
    skip, state = min(scheduler.computed(together[0]), fork), scheduler.state_row(together[0])
    most = skip + max(CHUNK_TOKENS, media - skip) - P
    begun = sum(scheduler.response_tokens(sample) for sample in together)
    for sample in job.samples:
        tokens = scheduler.response_tokens(sample)
        # Samples without pages are computed in the same turn and start later, as far as the tokens of a turn allow.
        fits = tokens <= most and (not tokens or begun + tokens <= PREFILL_TOKENS)
        if sample.waiting and sample.place is None and fits:
            together.append(sample)
            begun += tokens
    together.sort(key=lambda sample: sample.index)
    context = tuple(job.pages[: skip // PAGE_TOKENS])
    rest = part(prompt, np.zeros(0, np.int32), skip, P)
    responses, features = tuple(map(scheduler.response, together)), _features(scheduler, job, rest, P)
    return chunks, [*alone, (Prefix(rest, responses, context, state, rid, features), together)]


def _last_boundary(prompt: ModelInput) -> int:
    """The number of tokens in the full pages before a prompt's last token."""
    return (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS


def _chunk_end(scheduler: Scheduler, sample: RunningSample, media: int) -> int:
    """The token before which a sample's next chunk ends; 0 if all tokens of the sample fit a start. If layers have
    states, a chunk ends where the samples of a prompt part. If several samples have response tokens, such a chunk
    precedes their start even for a short prompt. Otherwise the row of each sample would repeat the prompt. The state
    behind such a chunk is kept for the next turn of a session."""
    job = sample.job
    done, fork = scheduler.computed(sample), _last_boundary(job.prompt)
    stop = done + max(CHUNK_TOKENS, media - done)
    stop = 0 if stop >= len(job.prompt) + scheduler.response_tokens(sample) else stop
    if not scheduler.limits.recurrent or done >= fork or media > fork:
        return stop
    begun = sum(scheduler.response_tokens(sibling) > 0 for sibling in scheduler.unstarted(job))
    keeps = scheduler.keeps_state(job) and job.state_tokens < fork
    return min(stop or fork, fork) if stop or begun > 1 or keeps else 0


def by_groups(vision: VisionInput | None) -> bool:
    """Says whether there are too many patches for one program, so that features are computed by groups."""
    return vision is not None and vision.num_patches > PREFILL_PATCHES


def _grouped(scheduler: Scheduler, job: Job) -> bool:
    """Says whether groups compute the features of a job. A prompt whose state is kept is cut at a page boundary, even
    within an image, and the image is computed once for both parts."""
    return by_groups(job.prompt.vision) or (job.prompt.vision is not None and scheduler.keeps_state(job))


def _features(scheduler: Scheduler, job: Job, part: ModelInput, end: int) -> FeatureWork | None:
    """The features that `part`, which ends before token `end`, needs before its prefill; None if `part` needs no
    features, or if the prefill computes them itself. The job keeps features as long as later tokens need any."""
    prompt, shown = job.prompt, job.prompt.shown[0]
    if not _grouped(scheduler, job) or not len(shown):
        return None
    from .prompt_pixels import FeatureWork, PromptFeatures

    kept = job.features or PromptFeatures.of(prompt, scheduler.limits.merge_unit, PREFILL_PATCHES)
    job.features = None if end > shown[-1] else kept
    return None if part.vision is None else FeatureWork(job.request.rid, kept, kept.plan(part.feature_index_T))


def pixels_ahead(scheduler: Scheduler) -> Iterator[ShadowTensor]:
    """Yields patches to fetch for turns after the planned turn, in about the order of their use. Yields about
    `AHEAD_PATCHES` patches, and at least one tensor if any prompt needs patches."""
    from .prompt_pixels import AHEAD_JOBS, AHEAD_PATCHES, PromptFeatures

    most = AHEAD_PATCHES
    for job in itertools.islice(scheduler.upcoming(), AHEAD_JOBS):
        prompt = scheduler.prompt_to_compute(job)
        if prompt.vision is None or not isinstance(prompt.vision.patches_PX, ShadowTensor):
            continue
        rest_T = prompt.feature_index_T[min(job.filled, (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS) :]
        if not (rest_T >= 0).any():
            continue
        tensors: list[np.ndarray | ShadowTensor] = [prompt.vision.patches_PX]
        if _grouped(scheduler, job):
            kept = job.features or PromptFeatures.of(prompt, scheduler.limits.merge_unit, PREFILL_PATCHES)
            tensors = list(map(kept.patches, kept.missing(rest_T)))
        for tensor in tensors:
            if isinstance(tensor, ShadowTensor):  # some patches may be in memory
                yield tensor
                most -= len(tensor)
            if most <= 0:
                return


def _media_end(prompt: ModelInput, grouped: bool) -> int:
    """The number of tokens up to the end of the page in which the last image or video ends; 0 without media, or if
    groups compute features."""
    tokens, _ = prompt.shown
    return pages_for(int(tokens[-1]) + 1) * PAGE_TOKENS if len(tokens) and not grouped else 0


def chunk_tokens(prompt: ModelInput) -> int:
    """The most tokens of one prefill from the beginning of a prompt."""
    return max(CHUNK_TOKENS, _media_end(prompt, by_groups(prompt.vision)))


def part(prompt: ModelInput, response_T: np.ndarray, start: int, end: int) -> ModelInput:
    """The tokens `start .. end` of a prompt and its response, with all media of the prompt if the tokens show any."""
    P = len(prompt)
    if not start and end == P:
        return prompt
    token_ids_T = np.concatenate([prompt.token_ids_T[start:end], response_T[max(start - P, 0) : max(end - P, 0)]])
    after_T = np.arange(max(start - P, 0), max(end - P, 0), dtype=np.int32) + prompt.next_position
    positions_3T = np.concatenate([prompt.positions_3T[:, start:end], np.tile(after_T, (3, 1))], axis=1)
    feature_index_T = np.pad(prompt.feature_index_T[start:end], (0, len(after_T)), constant_values=-1)
    vision = prompt.vision if (feature_index_T >= 0).any() else None
    following = prompt.next_position + max(end - P, 0)
    return ModelInput(token_ids_T.astype(np.int32), positions_3T, feature_index_T, following, vision)


def _chunk(scheduler: Scheduler, sample: RunningSample, part: ModelInput) -> StartStep:
    done, job = scheduler.computed(sample), sample.job
    context = tuple(sample.pages[: done // PAGE_TOKENS])
    features = _features(scheduler, job, part, done + len(part))
    prefix = Prefix(part, (np.zeros(0, np.int32),), context, scheduler.state_row(sample), job.request.rid, features)
    batch, filled = _pack([prefix], scheduler.limits, 1), job.filled
    writes = _writes(scheduler, batch, [sample], [batch.places[0][0]])
    end = done + len(part)
    job.filled = max(filled, min(end, len(job.pages) * PAGE_TOKENS))
    followers = [sample]
    if scheduler.limits.recurrent and end <= _last_boundary(job.prompt):
        followers = [sibling for sibling in scheduler.unstarted(job) if sibling.pages and sibling.filled == done]
    for follower in followers:
        follower.filled, follower.from_kept = end, False
    states = [follower.slot for follower in followers]
    if scheduler.keeps_state(job) and end == _last_boundary(job.prompt):
        states += scheduler.new_state(job, end)
    writes = _with_states(scheduler, writes, states, np.zeros(len(states), np.int32))
    return StartStep(batch, writes, np.zeros(0, np.int32))


def _start(scheduler: Scheduler, batch: PrefillBatch, samples: list[RunningSample]) -> StartStep:
    size = doubling(len(samples), _least_rows(scheduler.limits), scheduler.limits.slots)
    slots_B = np.array([sample.slot for sample in samples], np.int32)
    places: list[Place] = [sample.place[1] for sample in samples]
    writes = _writes(scheduler, batch, samples, places)
    writes = _with_states(scheduler, writes, slots_B.tolist(), np.array([place.row for place in places], np.int32))
    for sample in samples:
        sample.place = None
    row_B, prompt_B, start_B, response_B, _ = np.pad(np.array(places, np.int32), ((0, size - len(places)), (0, 0))).T
    last_B = np.where(response_B > 0, start_B + response_B, prompt_B) - (prompt_B + response_B > 0)
    index_B = np.pad(scheduler.table.produced_N[slots_B], (0, size - len(samples)))
    slot_B, sampling = scheduler.table.padded(slots_B, size), scheduler.table.sampling(slots_B, size)
    starts = Starts(row_B, last_B.astype(np.int32), slot_B, index_B, sampling)
    return StartStep(batch, writes, slots_B, starts)


def _writes(scheduler: Scheduler, batch: PrefillBatch, samples: list[RunningSample], places: list[Place]) -> PageWrites:
    """The pages that these samples fill from their rows: pages not written yet, each page of a prompt once. Marks
    prompts as written."""
    first_B, row_tokens = np.zeros(len(samples), np.int64), batch.inputs.tokens_BT.shape[1]
    for i, sample in enumerate(samples):
        first_B[i] = sample.written // PAGE_TOKENS
        sample.job.filled = len(sample.job.pages) * PAGE_TOKENS
    row_B, prompt_B, start_B, response_B, skip_B = np.array(places, np.int64).T
    count_B = np.maximum(-(-(skip_B + prompt_B + response_B) // PAGE_TOKENS) - first_B, 0)
    sample_W = np.repeat(np.arange(len(samples)), count_B)
    page_W = first_B[sample_W] + np.arange(len(sample_W)) - (np.cumsum(count_B) - count_B)[sample_W]
    entry_WS = page_W[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS) - skip_B[sample_W, None]
    behind_WS = entry_WS >= prompt_B[sample_W, None]
    column_WS = np.where(behind_WS, entry_WS + (start_B - prompt_B)[sample_W, None], entry_WS)
    slot_W = np.array([sample.slot for sample in samples])[sample_W]
    padding = doubling(len(page_W), _least_rows(scheduler.limits)) - len(page_W)
    no_page = scheduler.table.no_page
    return PageWrites(
        np.pad(scheduler.table.page_NC[slot_W, page_W], (0, padding), constant_values=no_page),
        np.pad(row_B[sample_W], (0, padding)).astype(np.int32),
        np.pad(np.clip(column_WS, 0, row_tokens - 1), ((0, padding), (0, 0))).astype(np.int32),
    )


def _with_states(scheduler: Scheduler, writes: PageWrites, states: list[int], row_B: np.ndarray) -> PageWrites:
    limits = scheduler.limits
    if not limits.recurrent:
        return writes
    size = doubling(len(states), _least_rows(limits), limits.slots)
    slot_B = scheduler.table.padded(states, size)
    return dataclasses.replace(writes, states=(slot_B, np.pad(row_B, (0, size - len(row_B)))))


def plan_round(scheduler: Scheduler) -> RoundPlan:
    slots_B = scheduler.to_decode()
    table, limits = scheduler.table, scheduler.limits
    size = doubling(len(slots_B), _least_rows(limits), limits.slots)
    return slots_B, table.round(slots_B, size, scheduler.steps, limits.round_tokens)


def _least_rows(limits: EngineLimits) -> int:
    """The least rows of a round or a start. From there, rows double up to all slots: rounds have at most 8 sizes."""
    least = min(LEAST_ROWS, limits.slots) if limits.small_model else 1
    return max(least, -(-limits.slots // 128))


def round_sizes(limits: EngineLimits, samples: int, tokens: int) -> list[int]:
    """The likely sizes of rounds, the largest first, in which `samples` samples get up to `tokens` tokens each.
    The estimate halves the number of running samples after each round. The start gives each sample its first token."""
    least, running = _least_rows(limits), min(samples, limits.slots)
    sizes = sorted({doubling(n, least, limits.slots) for n in range(1, running + 1)}, reverse=True)
    return sizes[: -(-(tokens - 1) // limits.round_tokens)]


def _layout(prefix: Prefix, limits: EngineLimits) -> tuple[list[int], list[Place]]:
    """The lengths of a prefix's rows, and the places of its samples, with rows counted from the prefix's first row.
    Responses fill a row up to `max_sequence_tokens`. If layers have states, a row has at most one response with tokens.
    """
    start, skip = len(prefix.prompt), len(prefix.context) * PAGE_TOKENS
    lengths, places = [start], []
    for response in prefix.responses:
        full = lengths[-1] + len(response) > limits.max_sequence_tokens and lengths[-1] > start
        parts = limits.recurrent and bool(places) and lengths[-1] + len(response) > start
        if full or parts:
            lengths.append(start)
        places.append(Place(len(lengths) - 1, start, lengths[-1], len(response), skip))
        lengths[-1] += len(response)
    return lengths, places


def _shape(rows: int, longest: int, least_area: int) -> tuple[int, int]:
    T = geometric(longest, LEAST_TOKENS)
    return doubling(rows, max(1, least_area // doubling(T, 1))), T


def plan(
    prefixes: Sequence[Prefix], limits: EngineLimits, batch_tokens: int, batch_patches: int
) -> Iterator[tuple[list[int], PrefillBatch]]:
    """Packs prefixes, in order, into batches of about `batch_tokens` (rows x row length) and `batch_patches`. Yields
    (indices of the prefixes in a batch, the batch). A row is a prompt and, as far as `limits` allow, its samples'
    tokens so far, each sample as a branch (`models.inputs.PackedTokens`). A prefix is never divided: a prefix that
    exceeds a bound has a batch of its own. For a small model, batches are padded to `LEAST_AREA`."""
    least_area = LEAST_AREA if limits.small_model else 1
    members: list[int] = []
    rows = longest = patches = 0
    for index, prefix in enumerate(prefixes):
        lengths, _ = _layout(prefix, limits)
        more = prefix.prompt.vision.num_patches if prefix.prompt.vision is not None else 0
        more = more if prefix.features is None else batch_patches + 1  # features belong to the only prompt of a batch
        B, T = _shape(rows + len(lengths), max(longest, *lengths), least_area)
        if members and (batch_tokens < B * T or patches + more > batch_patches):
            yield members, _pack([prefixes[i] for i in members], limits, least_area)
            members, rows, longest, patches = [], 0, 0, 0
        members.append(index)
        rows, longest, patches = rows + len(lengths), max(longest, *lengths), patches + more
    if members:
        yield members, _pack([prefixes[i] for i in members], limits, least_area)


def _pack(prefixes: Sequence[Prefix], limits: EngineLimits, least_area: int) -> PrefillBatch:
    merge_unit, layouts = limits.merge_unit, [_layout(prefix, limits) for prefix in prefixes]
    lengths = [length for row_lengths, _ in layouts for length in row_lengths]
    B, T = _shape(len(lengths), max(lengths), least_area)
    tokens_BT, segments_BT, branches_BT = np.zeros((3, B, T), np.int32)
    positions_3BT = np.zeros((3, B, T), np.int32)
    feature_index_BT = np.full((B, T), -1, np.int32)
    visions: list[VisionInput] = []
    shown: list[tuple[str, int, int]] = []
    places: list[list[Place]] = []
    row = features = 0
    for prefix, (row_lengths, relative_places) in zip(prefixes, layouts, strict=True):
        prompt, end = prefix.prompt, row + len(row_lengths)
        P = len(prompt)
        tokens_BT[row:end, :P] = prompt.token_ids_T
        positions_3BT[:, row:end, :P] = prompt.positions_3T[:, None]
        index = prompt.feature_index_T
        if prefix.features is not None:
            feature_index_BT[row:end, :P] = prefix.features.kept.places(index)
        else:
            feature_index_BT[row:end, :P] = np.where(index >= 0, index + features, -1)
        for r, length in enumerate(row_lengths, start=row):
            segments_BT[r, :length] = 1
        places.append([place._replace(row=row + place.row) for place in relative_places])
        for branch, (place, response) in enumerate(zip(places[-1], prefix.responses, strict=True), start=1):
            if not place.response_tokens:
                continue
            columns = slice(place.response_start, place.response_start + place.response_tokens)
            tokens_BT[place.row, columns] = response
            branches_BT[place.row, columns] = branch
            positions_3BT[:, place.row, columns] = prompt.next_position + np.arange(len(response), dtype=np.int32)
        if prompt.vision is not None and prefix.features is None:
            start = features * merge_unit
            shown.append((prefix.rid, start, start + prompt.vision.num_patches))
            visions.append(prompt.vision)
            features += prompt.vision.num_patches // merge_unit
        row = end
    predecessor_BT = np.broadcast_to(np.maximum(np.arange(T, dtype=np.int32) - 1, 0), (B, T))  # not read in a prefill
    vision = None
    if visions:
        from .prompt_pixels import padded_patches

        joined = concatenate(visions)
        vision = pad(joined, padded_patches(joined.num_patches, merge_unit))
    inputs = PackedTokens(tokens_BT, segments_BT, branches_BT, positions_3BT, predecessor_BT, feature_index_BT, vision)
    if limits.recurrent:  # a row is one run: it has one response at most
        size = chunk_size(limits.max_sequence_tokens)
        runs = packed_runs(segments_BT, np.zeros_like(branches_BT), -(-T // size), given=True, size=size)
        inputs = dataclasses.replace(inputs, runs=runs)
    context = _context(prefixes, [len(row_lengths) for row_lengths, _ in layouts], B, limits)
    return PrefillBatch(inputs, places, sum(lengths), context, tuple(shown), prefixes[0].features)


def _context(prefixes: Sequence[Prefix], rows: Sequence[int], B: int, limits: EngineLimits) -> Context | None:
    if not any(prefix.context for prefix in prefixes):
        return None
    most = doubling(max(len(prefix.context) for prefix in prefixes), LEAST_CONTEXT // PAGE_TOKENS)
    pages_BC, (length_B, slot_B) = np.zeros((B, most), np.int32), np.zeros((2, B), np.int32)
    row = 0
    for prefix, count in zip(prefixes, rows, strict=True):
        pages_BC[row : row + count, : len(prefix.context)] = prefix.context
        length_B[row : row + count] = len(prefix.context) * PAGE_TOKENS
        slot_B[row : row + count] = prefix.slot
        row += count
    return Context(pages_BC, length_B, slot_B if limits.recurrent else None)
