"""The running samples as one array a property, so that a round is prepared and taken in without a loop over slots."""

from __future__ import annotations

import numpy as np

from .engine import GenerateRequest
from .programs import DecodeRound, doubling
from .sampling import SlotSampling, seed_words

LEAST_IDS = 8  # stop and forbidden ids a slot; doubled when a request brings more


class SlotTable:
    """The state of `N` slots on the host; entries of free slots are stale."""

    def __init__(self, slots: int, max_sequence_tokens: int) -> None:
        self.slots = slots
        self.prompt_N = np.zeros(slots, np.int32)  # tokens of the prompt
        self.next_position_N = np.zeros(slots, np.int32)  # rotary position of the response's first token
        self.produced_N = np.zeros(slots, np.int32)  # tokens of the response, prefix included
        self.limit_N = np.zeros(slots, np.int32)  # the most tokens that the response may have
        self.response_NT = np.zeros((slots, max_sequence_tokens), np.int32)
        self.temperature_N = np.ones(slots, np.float32)
        self.top_p_N = np.ones(slots, np.float32)
        self.top_k_N = np.zeros(slots, np.int32)
        self.seed_N2 = np.zeros((slots, 2), np.uint32)
        self.sample_N = np.zeros(slots, np.int32)
        self.stop_ids_NI = np.full((slots, LEAST_IDS), -1, np.int32)
        self.forbidden_ids_NI = np.full((slots, LEAST_IDS), -1, np.int32)

    def assign(self, slot: int, request: GenerateRequest, sample: int, prefix: tuple[int, ...]) -> None:
        sampling = request.sampling
        self.prompt_N[slot] = len(request.prompt)
        self.next_position_N[slot] = request.prompt.next_position
        self.produced_N[slot] = len(prefix)
        self.limit_N[slot] = sampling.max_new_tokens
        self.response_NT[slot, : len(prefix)] = prefix
        self.temperature_N[slot] = sampling.temperature
        self.top_p_N[slot] = sampling.top_p
        self.top_k_N[slot] = sampling.top_k
        self.seed_N2[slot] = seed_words(request.seed)
        self.sample_N[slot] = sample
        self.stop_ids_NI = _with_ids(self.stop_ids_NI, slot, sampling.stop_ids)
        self.forbidden_ids_NI = _with_ids(self.forbidden_ids_NI, slot, sampling.forbidden_ids)

    def extend(self, slots_B: np.ndarray, tokens_BR: np.ndarray, count_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds the first `count_B` (at least 1) tokens to each slot; returns who hit a stop id, and who the limit."""
        fresh_BR = np.arange(tokens_BR.shape[1]) < count_B[:, None]
        column_BR = self.produced_N[slots_B][:, None] + np.arange(tokens_BR.shape[1])
        row_BR = np.broadcast_to(slots_B[:, None], column_BR.shape)
        self.response_NT[row_BR[fresh_BR], column_BR[fresh_BR]] = tokens_BR[fresh_BR]
        self.produced_N[slots_B] += count_B
        last_B = np.take_along_axis(tokens_BR, count_B[:, None] - 1, axis=1)
        stop_B = (last_B == self.stop_ids_NI[slots_B]).any(axis=1)
        return stop_B, self.produced_N[slots_B] >= self.limit_N[slots_B]

    def sampling(self, slots_B: np.ndarray, size: int) -> SlotSampling:
        """The parameters of some slots, filled up to `size` rows with those of slot 0 (never looked at)."""
        slots_B = _filled(slots_B, size, 0)
        return SlotSampling(
            self.temperature_N[slots_B],
            self.top_p_N[slots_B],
            self.top_k_N[slots_B],
            _trimmed(self.stop_ids_NI[slots_B]),
            _trimmed(self.forbidden_ids_NI[slots_B]),
            self.seed_N2[slots_B],
            self.sample_N[slots_B],
        )

    def round(self, slots_B: np.ndarray, size: int) -> DecodeRound:
        """The input of the decode program, filled up to `size` rows with slots out of range and nothing to do."""
        padding = size - len(slots_B)
        produced_B = self.produced_N[slots_B]
        cached_B = self.prompt_N[slots_B] + produced_B - 1  # the last token is the round's first input

        def fill(x_B: np.ndarray) -> np.ndarray:
            return np.pad(x_B, (0, padding))

        return DecodeRound(
            slots_B=_filled(slots_B, size, self.slots),
            token_B=fill(self.response_NT[slots_B, produced_B - 1]),
            position_B=fill(self.next_position_N[slots_B] + produced_B - 1),
            length_B=fill(cached_B),
            index_B=fill(produced_B),
            remaining_B=fill(self.limit_N[slots_B] - produced_B),
            sampling=self.sampling(slots_B, size),
        )


def _filled(x_B: np.ndarray, size: int, value: int) -> np.ndarray:
    return np.pad(x_B, (0, size - len(x_B)), constant_values=value).astype(np.int32)


def _trimmed(ids_BI: np.ndarray) -> np.ndarray:
    """Only as wide as these slots need: other requests, past or present, must not decide the compiled shape."""
    return ids_BI[:, : doubling(int((ids_BI >= 0).sum(axis=1).max()), LEAST_IDS)]


def _with_ids(ids_NI: np.ndarray, slot: int, ids: tuple[int, ...]) -> np.ndarray:
    """Writes a slot's list of ids, in a wider table if need be."""
    width = doubling(len(ids), ids_NI.shape[1])
    ids_NI = np.pad(ids_NI, ((0, 0), (0, width - ids_NI.shape[1])), constant_values=-1)
    ids_NI[slot] = -1
    ids_NI[slot, : len(ids)] = ids
    return ids_NI
