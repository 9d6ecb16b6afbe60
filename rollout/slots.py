"""The host's tables of an engine: the pages of its KV cache, and the settings, tokens and pages of each slot's sample.

A page has room for `PAGE_TOKENS` tokens in every layer. Several samples may hold one page, as a group shares the full
pages of its prompt. A page is free when no sample holds it.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Int, UInt32

from models.inputs import AnyArray

from .engine import GenerateRequest

PAGE_TOKENS = 16
LEAST_IDS = 8  # the fewest columns for stop and forbidden ids; doubled when a request has more


def doubling(size: int, least: int, most: int | None = None) -> int:
    """The smallest of `least, 2 least, 4 least, ...` that holds `size`; at most `most`, unless `size` is larger."""
    bucket = least
    while bucket < size:
        bucket *= 2
    return bucket if most is None else min(bucket, max(most, size))


def geometric(size: int, least: int) -> int:
    """The smallest of `least, 1.5 least, 2 least, 3 least, ...` that holds `size`."""
    bucket = doubling(size, least)
    if bucket > least and size <= bucket * 3 // 4:
        bucket = bucket * 3 // 4
    return bucket


def pages_for(tokens: int) -> int:
    """The number of pages that `tokens` fill; the last page may be partly filled."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Counts the holders of pages. Takes the lowest free pages first, so that equal histories give equal pages."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.holders = [0] * total  # number of holders of each page
        self.peak = 0  # the most pages held at once
        self._free = list(range(total))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes free pages for their first holder. Raises ValueError if there are too few."""
        if count > len(self._free):
            raise ValueError(f"{count} pages are needed, but only {len(self._free)} of {self.total} are free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        self.peak = max(self.peak, self.total - self.free)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each of these pages; every page must have a holder already."""
        for page in pages:
            assert self.holders[page] > 0, "a page that nobody holds has no contents to share"
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from each of these pages; pages without a holder are free."""
        for page in pages:
            assert self.holders[page] > 0, "a page that nobody holds can't be released"
            self.holders[page] -= 1
            if not self.holders[page]:
                heapq.heappush(self._free, page)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """`SamplingParams` and seeds of `B` slots as arrays. Lists of ids are filled up with -1."""

    temperature_B: Float[AnyArray, " B"]  # 0 is greedy
    top_p_B: Float[AnyArray, " B"]
    top_k_B: Int[AnyArray, " B"]  # 0 is off
    stop_ids_BI: Int[AnyArray, "B I"]
    forbidden_ids_BI: Int[AnyArray, "B J"]
    seed_B2: UInt32[AnyArray, "B 2"]  # the words of the request's seed, high first
    sample_B: Int[AnyArray, " B"]  # number of the sample in its request
    # Says whether a slot may have a top-k or top-p. Each value has compiled programs of its own.
    limited: bool = dataclasses.field(default=True, metadata={"static": True})


def seed_words(seed: int) -> tuple[int, int]:
    """The lowest 64 bits of a seed of any size and sign, as two 32-bit words, high word first."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeRound:
    """Samples to decode. A row's first input is the sample's last token, which the device keeps by slot, and the cache
    does not have yet. The row of a sample that has ended does nothing."""

    pages_BC: Int[AnyArray, "B C"]  # pages of each sample, filled up with pages out of range
    steps: Int[AnyArray, ""]  # the most tokens that a sample gets in this round
    slot_B: Int[AnyArray, " B"]  # out of range in padding
    position_B: Int[AnyArray, " B"]  # rotary position of the last token
    length_B: Int[AnyArray, " B"]  # entries in the cache
    index_B: Int[AnyArray, " B"]  # tokens of the response so far
    remaining_B: Int[AnyArray, " B"]  # tokens that the sample may still get; 0 in padding
    sampling: SlotSampling
    longest: int = dataclasses.field(metadata={"static": True})  # the most tokens of a sample in any round


class SlotTable:
    """The tables of `N` slots on the host, in a cache of `pages` pages; entries of free slots are stale."""

    def __init__(self, slots: int, max_sequence_tokens: int, pages: int, kept_states: int = 0) -> None:
        self.no_page = pages  # out of range: entries of this page are dropped
        self.no_slot = slots + kept_states  # out of range: the cache has the kept states behind those of the slots
        self.page_NC = np.full((slots, pages_for(max_sequence_tokens)), pages, np.int32)  # pages of a slot's entries
        self.pages_N = np.zeros(slots, np.int32)  # the number of valid pages in a row of `page_NC`; 0: all are stale
        self.prompt_N = np.zeros(slots, np.int32)  # tokens of the prompt
        self.next_position_N = np.zeros(slots, np.int32)  # rotary position of the response's first token
        self.produced_N = np.zeros(slots, np.int32)  # tokens of the response that were read, prefix included
        self.unread_N = np.zeros(slots, np.int32)  # further tokens that the device computes, if no stop id comes
        self.limit_N = np.zeros(slots, np.int32)  # the most tokens that the response may have
        self.response_NT = np.zeros((slots, max_sequence_tokens), np.int32)
        self.temperature_N = np.ones(slots, np.float32)
        self.top_p_N = np.ones(slots, np.float32)
        self.top_k_N = np.zeros(slots, np.int32)
        self.seed_N2 = np.zeros((slots, 2), np.uint32)
        self.sample_N = np.zeros(slots, np.int32)
        self.stop_ids_NI = np.full((slots, LEAST_IDS), -1, np.int32)
        self.forbidden_ids_NI = np.full((slots, LEAST_IDS), -1, np.int32)

    def assign(self, request: GenerateRequest, samples: list[int], slots: list[int], prefixes: list[tuple]) -> None:
        """Gives free slots to samples of one request, whose responses begin with `prefixes`."""
        sampling = request.sampling
        self.prompt_N[slots] = len(request.prompt)
        self.next_position_N[slots] = request.prompt.next_position
        self.produced_N[slots] = list(map(len, prefixes))
        self.unread_N[slots] = 0
        for slot, prefix in zip(slots, prefixes, strict=True):
            self.response_NT[slot, : len(prefix)] = prefix
        self.limit_N[slots] = sampling.max_new_tokens
        self.temperature_N[slots] = sampling.temperature
        self.top_p_N[slots] = sampling.top_p
        self.top_k_N[slots] = sampling.top_k
        self.seed_N2[slots] = seed_words(request.seed)
        self.sample_N[slots] = [request.samples[i] for i in samples] if request.samples else samples
        self.stop_ids_NI = _with_ids(self.stop_ids_NI, slots, sampling.stop_ids)
        self.forbidden_ids_NI = _with_ids(self.forbidden_ids_NI, slots, sampling.forbidden_ids)

    def place(self, slot: int, pages: list[int]) -> None:
        """Records the pages of a slot's sample."""
        self.page_NC[slot, : len(pages)] = pages
        self.page_NC[slot, len(pages) :] = self.no_page
        self.pages_N[slot] = len(pages)

    @property
    def tokens_N(self) -> np.ndarray:
        """The number of tokens of each slot's response after all dispatched turns, if no stop id comes."""
        return self.produced_N + self.unread_N

    def wanted_pages(self, slots_B: np.ndarray, steps: int) -> np.ndarray:
        """The pages of each slot's sample with `steps` more tokens, or up to its limit; the last is not cached."""
        tokens_B = self.tokens_N[slots_B] + steps
        entries_B = np.minimum(tokens_B, self.limit_N[slots_B]) + self.prompt_N[slots_B] - 1
        return -(-entries_B // PAGE_TOKENS)

    def missing_pages(self, slots_B: np.ndarray, steps: int) -> np.ndarray:
        """The pages that each slot's sample needs for `steps` more tokens in addition to its present pages."""
        return np.maximum(self.wanted_pages(slots_B, steps) - self.pages_N[slots_B], 0)

    def extend(self, slots_B: np.ndarray, tokens_BR: np.ndarray, count_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds the first `count_B` (at least 1) tokens to each slot; returns (stopped, at the limit) by slot."""
        fresh_BR = np.arange(tokens_BR.shape[1]) < count_B[:, None]
        column_BR = self.produced_N[slots_B][:, None] + np.arange(tokens_BR.shape[1])
        row_BR = np.broadcast_to(slots_B[:, None], column_BR.shape)
        self.response_NT[row_BR[fresh_BR], column_BR[fresh_BR]] = tokens_BR[fresh_BR]
        self.produced_N[slots_B] += count_B
        last_B = np.take_along_axis(tokens_BR, count_B[:, None] - 1, axis=1)
        stop_B = (last_B == self.stop_ids_NI[slots_B]).any(axis=1)
        return stop_B, self.produced_N[slots_B] >= self.limit_N[slots_B]

    def sampling(self, slots_B: np.ndarray, size: int) -> SlotSampling:
        """The sampling parameters of these slots, filled up to `size` rows with those of slot 0, which nobody reads."""
        limited_B = (self.temperature_N > 0)[slots_B] & ((self.top_p_N < 1) | (self.top_k_N > 0))[slots_B]
        slots_B = np.pad(slots_B, (0, size - len(slots_B))).astype(np.int32)
        return SlotSampling(
            self.temperature_N[slots_B],
            self.top_p_N[slots_B],
            self.top_k_N[slots_B],
            _trimmed(self.stop_ids_NI[slots_B]),
            _trimmed(self.forbidden_ids_NI[slots_B]),
            self.seed_N2[slots_B],
            self.sample_N[slots_B],
            limited=bool(limited_B.any()),
        )

    def round(self, slots_B: np.ndarray, size: int, steps: int, longest: int) -> DecodeRound:
        """The input of the decode program for a round of `steps` tokens, filled up to `size` rows that do nothing. One
        program serves all rounds of at most `longest` tokens."""
        padding = size - len(slots_B)
        tokens_B = self.tokens_N[slots_B]

        def fill(x_B: np.ndarray) -> np.ndarray:
            return np.pad(x_B, (0, padding))

        return DecodeRound(
            pages_BC=np.pad(self.page_NC[slots_B], ((0, padding), (0, 0)), constant_values=self.no_page),
            steps=np.array(steps, np.int32),
            slot_B=self.padded(slots_B, size),
            position_B=fill(self.next_position_N[slots_B] + tokens_B - 1),
            length_B=fill(self.prompt_N[slots_B] + tokens_B - 1),  # the last token is the round's first input
            index_B=fill(tokens_B),
            remaining_B=fill(self.limit_N[slots_B] - tokens_B),
            sampling=self.sampling(slots_B, size),
            longest=longest,
        )

    def padded(self, slots: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
        """The slots, filled up to `size` with a slot out of range."""
        return np.pad(np.asarray(slots, np.int32), (0, size - len(slots)), constant_values=self.no_slot)


def _trimmed(ids_BI: np.ndarray) -> np.ndarray:
    """The ids, in as few columns as these slots need, so that other requests never decide the compiled shape."""
    return ids_BI[:, : doubling(int((ids_BI >= 0).sum(axis=1).max()), LEAST_IDS)]


def _with_ids(ids_NI: np.ndarray, slots: list[int], ids: tuple[int, ...]) -> np.ndarray:
    width = doubling(len(ids), ids_NI.shape[1])
    if width > ids_NI.shape[1]:  # `np.pad` takes longer than the rest of a start
        ids_NI = np.pad(ids_NI, ((0, 0), (0, width - ids_NI.shape[1])), constant_values=-1)
    ids_NI[slots] = -1
    ids_NI[slots, : len(ids)] = ids
    return ids_NI
