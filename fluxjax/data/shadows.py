"""Prompts with shadows in the place of pixels: a store looks at their media, engines and trainer fetch the pixels.

Media that are known are not looked at again: whoever decodes a file that has changed meanwhile finds out
(`StaleTicket`), and `MediaIndex.forget` makes the next look one at the file. A newer file never gives its pixels to an
older ticket.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from models.inputs import ModelInput, OutlinedInput, PromptInput
from models.processing import MediaError, Processor
from models.processing.media import MediaSettings
from models.processing.media_file import Facts, MediaUnavailable, Medium
from models.processing.processor import PromptOutline
from models.shadow import Rows, ShadowTensor

from ..base.types import Media, Prompt
from .locations import local
from .media_cache import Recent
from .tickets import MediaRef, MediaStore, StaleTicket, Ticket, read_ref, ref_of

if TYPE_CHECKING:
    from .near_pixels import NearPixels

Verdict: TypeAlias = Medium | MediaError  # what decoding showed: the medium, or why it can't be used
KNOWN = 1 << 17  # media; those that were not asked for longest are forgotten


@dataclasses.dataclass(frozen=True)
class _KnownMedium:
    """A medium in one version of its file."""

    stamp: str
    facts: Facts | None = None
    settings: str = ""  # the digest of those by which the verdict was found
    verdict: Verdict | None = None


class MediaIndex:
    """Known media, by kind, path and cell. Read and written from any thread."""

    def __init__(self) -> None:
        self._media = Recent[_KnownMedium](KNOWN)
        self._lock = threading.Lock()  # of changes

    def ref(self, media: Media) -> MediaRef:
        """The reference of a medium: the known one, without a look at the medium's file, or else as `ref_of` makes it.
        Raises MediaError as `ref_of` does."""
        if media.stamp or media.data is not None:
            return ref_of(media)
        kind, path = media.kind.value, local(media.path)
        known = self._media.get((kind, path, media.cell))
        return ref_of(media) if known is None else MediaRef(kind, path, known.stamp, media.cell)

    def facts(self, ref: MediaRef) -> Facts | None:
        """The medium's size, if it is known."""
        return self._known(ref).facts

    def verdict(self, ref: MediaRef, settings: str) -> Verdict | None:
        """The result of decoding by the settings of this digest: the medium, or why it can't be used. None: not
        known."""
        known = self._known(ref)
        said = known.verdict if known.settings == settings else None
        return MediaError(ref.name, said.reason) if isinstance(said, MediaError) else said

    def medium(self, ref: MediaRef, settings: MediaSettings) -> tuple[Medium, bool] | None:
        """The medium, and whether decoding or counting its frames has confirmed it (else only its header says so); None
        where it is not known. Raises MediaError for a medium that can't be used."""
        said = self.verdict(ref, settings.digest)
        if isinstance(said, MediaError):
            raise said
        if said is not None:
            return said, True
        facts = self.facts(ref)
        return None if facts is None else settings.medium_by(ref.kind, ref.name, facts)

    def note(self, ref: MediaRef, facts: Facts) -> None:
        """Adds facts about a medium. A header's word does not take the place of counted frames."""
        with self._lock:
            known = self._known(ref)
            if known.facts is None or facts.counted or not known.facts.counted:
                self._media.put(_key_of(ref), dataclasses.replace(known, facts=facts))

    def note_all(self, refs: Sequence[MediaRef], settings: str, found: Sequence[Ticket | MediaError]) -> None:
        """Adds the answers of a store that was asked to look at media by the settings of this digest. Errors that may
        pass (`MediaUnavailable`) are not kept."""
        for ref, said in zip(refs, found, strict=True):
            if isinstance(said, StaleTicket):
                self.forget(ref)
            elif not isinstance(said, MediaUnavailable):
                verdict = said.medium if isinstance(said, Ticket) else said
                with self._lock:
                    known = dataclasses.replace(self._known(ref), settings=settings, verdict=verdict)
                    self._media.put(_key_of(ref), known)

    def forget(self, ref: MediaRef) -> None:
        """Forgets a medium, whatever the version of its file, so that its file is looked at again."""
        self._media.drop(_key_of(ref))

    def _known(self, ref: MediaRef) -> _KnownMedium:
        known = self._media.get(_key_of(ref))
        return known if known is not None and known.stamp == ref.stamp else _KnownMedium(ref.stamp)


def _key_of(ref: MediaRef) -> tuple[str, str, str]:
    return ref.kind, ref.path, ref.cell


@dataclasses.dataclass(frozen=True)
class ProxyMedia:
    """The media of prompts in a process that prepares prompts without their pixels: the `index` says what is known of
    media, the `store` decodes them, perhaps elsewhere. `near` fetches the pixels of coming prompts: of every
    `among`-th, where `among` processes generate."""

    store: MediaStore
    index: MediaIndex
    near: NearPixels | None = None
    among: int = 1

    def can_name(self, media: Sequence[Media]) -> bool:
        """Says whether all of these media are in files, so that tickets can name them."""
        return all(medium.data is None for medium in media)

    def expect(self, draw: int, inputs: PromptInput) -> None:
        """Says that this prompt will be drawn next, behind those that were expected before. Does not block."""
        if self.near is not None and draw % self.among == 0:
            self.near.expect(rows_of(inputs))

    def pass_by(self, inputs: PromptInput) -> None:
        """Says that this prompt's pixels need not be fetched ahead any more; those that are here may be kept for a
        later use."""
        if self.near is not None:
            self.near.pass_by(rows_of(inputs))

    def outline(self, processor: Processor, token_ids: Sequence[int], prompt: Prompt, *, count: bool) -> PromptOutline:
        """The sizes of a prompt, from what is known of its media, or from their headers; with `count`, videos of which
        nobody has counted the frames are read through. Raises PromptError and MediaError."""
        found = [self._glance(processor, self.index.ref(medium), count) for medium in prompt.media]
        return processor.outline_of(token_ids, [medium for medium, _ in found], certain=all(sure for _, sure in found))

    def inputs(self, processor: Processor, token_ids: Sequence[int], prompt: Prompt) -> OutlinedInput:
        """The model input of a prompt, whose media the store has looked at. Raises the MediaError of the first medium
        that can't be used."""
        refs = [self.index.ref(medium) for medium in prompt.media]
        found = self._look(processor, refs)
        if stale := [k for k, said in enumerate(found) if isinstance(said, StaleTicket)]:
            fresh = self._look(processor, [ref_of(prompt.media[k]) for k in stale])  # the index was behind
            for k, said in zip(stale, fresh, strict=True):
                found[k] = said
        for said in found:
            if isinstance(said, MediaError):
                raise said
        lay_out = layout(processor, token_ids, [said for said in found if isinstance(said, Ticket)])
        return OutlinedInput(lay_out(), lay_out)

    def _look(self, processor: Processor, refs: Sequence[MediaRef]) -> list[Ticket | MediaError]:
        known = [self.index.verdict(ref, processor.settings.digest) for ref in refs]
        asked = [ref for ref, said in zip(refs, known, strict=True) if not isinstance(said, MediaError)]
        answers = self.store.look(asked)
        self.index.note_all(asked, processor.settings.digest, answers)
        answered = iter(answers)
        return [said if isinstance(said, MediaError) else next(answered) for said in known]

    def _glance(self, processor: Processor, ref: MediaRef, count: bool) -> tuple[Medium, bool]:
        known = self.index.medium(ref, processor.settings)
        if known is None or (count and not known[1]):
            facts = processor.settings.facts(ref.kind, read_ref(ref), count=count)
            self.index.note(ref, facts)
            known = processor.settings.medium_by(ref.kind, ref.name, facts)
        return known or self._glance(processor, ref, True)


def rows_of(inputs: PromptInput) -> tuple[Rows, ...]:
    """The rows of tickets that a prompt has in the place of pixels."""
    patches = inputs.patches_PX
    return patches.elsewhere if isinstance(patches, ShadowTensor) else ()


def layout(processor: Processor, token_ids: Sequence[int], tickets: Sequence[Ticket]) -> Callable[[], ModelInput]:
    """Returns a function that makes the model input of a tokenised prompt with these media, without touching their
    files. This function and the returned one raise PromptError and ValueError where prompt and media do not fit
    together."""
    if wrong := next((ticket for ticket in tickets if ticket.settings != processor.settings.digest), None):
        raise ValueError(f"{wrong.ref.name} was preprocessed by other settings than those of this process")
    outline = processor.outline_of(token_ids, [ticket.medium for ticket in tickets])
    values = processor.settings.patch_bytes
    shadows = [ticket.shadow(values) for ticket in tickets]
    return functools.partial(processor.lay_out, outline, _joined(shadows) if shadows else None)


def _joined(shadows: Sequence[ShadowTensor]) -> ShadowTensor:
    if len(shadows) == 1:
        return shadows[0]
    joined = np.concatenate(shadows)  # pyright: ignore[reportArgumentType, reportCallIssue] (its own protocol)
    assert isinstance(joined, ShadowTensor)
    return joined
