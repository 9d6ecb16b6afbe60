"""The prefixes of conversations that an engine keeps in its cache between two turns.

A sample of a request with a session keeps the pages of its conversation when it ends. Kept pages are full pages whose
entries are all written, and nobody writes them again. The next turn of the conversation shares the pages of the longest
common prefix, and computes the tokens behind this prefix only. A token is the same in two prompts if its id, its rotary
positions and the medium that it shows are the same.

Kept pages count as free: they are given to samples that need pages, those of the oldest prefix first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from models.inputs import ModelInput, VisionInput, cut
from models.shadow import ShadowTensor

from .slots import PAGE_TOKENS, PagePool

Identity: TypeAlias = np.ndarray  # i64 [5, T]: id, three positions, and the name of the feature of each token (0: none)
FIRST = -1  # stands for a sample's number: the prefix with which a session began
NAME_BYTES = 7  # of the digest of a medium, so that names of features fit int64


@dataclasses.dataclass(frozen=True, eq=False)
class KeptPrefix:
    """The pages of a conversation's first tokens, and the identity of these tokens."""

    pages: list[int]
    identity_5T: Identity
    state: int  # the number of the kept state behind these tokens; -1 if layers have no states

    @property
    def state_held(self) -> list[int]:
        return [self.state] if self.state >= 0 else []

    def usable(self, identity_5T: Identity) -> int:
        """The number of pages with which the pages of a prompt can begin. The prompt's last token is left out, since
        its hidden state must be computed. A state is behind all pages."""
        common = common_tokens(self.identity_5T, identity_5T[:, :-1])
        return 0 if self.state >= 0 and common < self.identity_5T.shape[1] else common // PAGE_TOKENS


class KeptPages:
    """The kept prefixes of all conversations, by session and number of the sample. A prefix holds its pages in `pool`
    and, if layers have states, its state in `states`. The first prefix with a state stays as `FIRST` when its
    conversation goes on: if the context is rewritten, no later state can be used."""

    def __init__(self, pool: PagePool, states: PagePool) -> None:
        self._pool, self.states = pool, states
        self._prefixes: dict[tuple[str, int], KeptPrefix] = {}  # the oldest first
        self._counts = np.zeros(pool.total, np.int64)  # the number of prefixes that hold each page

    def keep(self, session: str, number: int, pages: list[int], identity_5T: Identity, state: int) -> None:
        """Keeps the full pages of these tokens, in the place of the conversation's earlier prefix. Somebody else must
        hold pages and state still. Keeps nothing if there is no full page."""
        count = identity_5T.shape[1] // PAGE_TOKENS
        if not count:
            return
        prefix = KeptPrefix(pages[:count], identity_5T[:, : count * PAGE_TOKENS], state)
        self._pool.share(prefix.pages)
        self.states.share(prefix.state_held)
        self._counts[prefix.pages] += 1
        self._drop([(session, number)])
        self._prefixes[session, number] = prefix
        if state >= 0 and (session, FIRST) not in self._prefixes:
            self.keep(session, FIRST, pages, identity_5T, state)

    def match(self, session: str, numbers: Iterable[int], identity_5T: Identity) -> tuple[list[int], int]:
        """The full pages of the longest prefix that one of these conversations has in common with a prompt, and the
        state behind these pages. The prefix becomes the youngest."""
        found = [key for number in (*numbers, FIRST) if (key := (session, number)) in self._prefixes]
        usable = {key: self._prefixes[key].usable(identity_5T) for key in found}
        if not any(usable.values()):
            return [], -1
        best = max(found, key=usable.__getitem__)
        prefix = self._prefixes[best] = self._prefixes.pop(best)
        return prefix.pages[: usable[best]], prefix.state

    def take_state(self) -> int:
        """Takes a kept state; drops the oldest prefixes if none is free. Returns -1 if all belong to jobs."""
        while not self.states.free and self._prefixes:
            self._drop([next(iter(self._prefixes))])
        return self.states.take(1)[0] if self.states.free else -1

    def fits(self, count: int) -> bool:
        """Says whether `count` pages are free, or would be if no prefix was kept."""
        if count <= self._pool.free:
            return True
        alone = (self._counts > 0) & (self._counts == np.asarray(self._pool.holders))
        return count <= self._pool.free + int(alone.sum())

    def make_room(self, count: int) -> bool:
        """Drops the oldest prefixes until `count` pages are free. Returns False if too many pages belong to samples."""
        while self._pool.free < count and self._prefixes:
            self._drop([next(iter(self._prefixes))])
        return count <= self._pool.free

    def end(self, session: str) -> None:
        """Drops the prefixes of a session; if its name is empty, those of all sessions."""
        self._drop([key for key in self._prefixes if session in ("", key[0])])

    def _drop(self, keys: Iterable[tuple[str, int]]) -> None:
        for key in keys:
            if (prefix := self._prefixes.pop(key, None)) is not None:
                self._pool.release(prefix.pages)
                self.states.release(prefix.state_held)
                self._counts[prefix.pages] -= 1


def identity_of(prompt: ModelInput, merge_unit: int) -> Identity:
    """The identity of a prompt's tokens. The name of a feature comes from the content of its frame pair, so that equal
    media have equal names in all prompts."""
    name_T = np.zeros(len(prompt), np.int64)
    if prompt.vision is not None:
        edges, (tokens, features) = _whole_features(prompt, merge_unit), prompt.shown
        names = np.array([_name(prompt.vision, *ends) for ends in itertools.pairwise(edges)], np.int64)
        starts = np.array(edges[:-1]) // merge_unit
        group = np.searchsorted(starts, features, side="right") - 1
        name_T[tokens] = names[group] + features - starts[group]
    return np.concatenate([prompt.token_ids_T[None], prompt.positions_3T, name_T[None]]).astype(np.int64)


def with_response(identity_5T: Identity, prompt: ModelInput, response_T: np.ndarray) -> Identity:
    """The identity of a prompt's tokens and of the tokens of its response."""
    positions_3T = np.tile(prompt.next_position + np.arange(len(response_T)), (3, 1))
    after_5T = np.concatenate([response_T[None], positions_3T, np.zeros((1, len(response_T)))]).astype(np.int64)
    return np.concatenate([identity_5T, after_5T], axis=1)


def common_tokens(first_5T: Identity, second_5T: Identity) -> int:
    """The number of tokens with which both sequences begin."""
    T = min(first_5T.shape[1], second_5T.shape[1])
    same_T = (first_5T[:, :T] == second_5T[:, :T]).all(axis=0)
    return T if same_T.all() else int(same_T.argmin())


def without_media(prompt: ModelInput, tokens: int, merge_unit: int) -> ModelInput:
    """The prompt without the media that only its first `tokens` tokens show. These tokens then show no feature."""
    index_T = np.where(np.arange(len(prompt)) < tokens, -1, prompt.feature_index_T).astype(np.int32)
    features = index_T[index_T >= 0]
    if prompt.vision is None or not len(features):
        return dataclasses.replace(prompt, feature_index_T=index_T, vision=None)
    first = int(features.min()) * merge_unit
    start = max(edge for edge in _whole_features(prompt, merge_unit) if edge <= first)
    index_T = np.where(index_T >= 0, index_T - start // merge_unit, -1).astype(np.int32)
    vision = cut(prompt.vision, start, prompt.vision.num_patches)
    return dataclasses.replace(prompt, feature_index_T=index_T, vision=vision)


def _whole_features(prompt: ModelInput, merge_unit: int) -> list[int]:
    """The edges of frame pairs that divide no feature."""
    return [edge for edge in prompt.frame_edges if edge % merge_unit == 0]


def _name(vision: VisionInput, start: int, stop: int) -> int:
    """A number for the content of some frame pairs: their layout, and their pixels or where these can be fetched."""
    digest, patches_PX = hashlib.sha256(), vision.patches_PX[start:stop]
    frames_P, windows_P = vision.frame_segments_P[start:stop], vision.window_segments_P[start:stop]
    for array in (vision.positions_P2[start:stop], frames_P - frames_P[0], windows_P - windows_P.min()):
        digest.update(np.ascontiguousarray(array).data)
    for piece in patches_PX.pieces if isinstance(patches_PX, ShadowTensor) else (patches_PX,):
        digest.update(np.ascontiguousarray(piece).data if isinstance(piece, np.ndarray) else repr(piece).encode())
    return 1 + int.from_bytes(digest.digest()[:NAME_BYTES], "big")
