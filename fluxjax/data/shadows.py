"""Prompts with shadows in the place of pixels.

A store decodes the media and gives tickets, by which engines and trainer fetch the pixels. The index remembers the
version of each file. If a file changed, fetching its pixels raises `StaleTicket` until `forget`."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from models.inputs import ModelInput, OutlinedInput, PromptInput
from models.processing import MediaError, Processor
from models.processing.media import MediaSettings
from models.processing.media_file import Facts, MediaUnavailable, Medium
from models.processing.processor import PromptOutline
from models.shadow import Rows, ShadowTensor

from ..base.types import Media, Prompt, Response
from .locations import local
from .media_cache import Recent
from .tickets import MediaRef, MediaStore, StaleTicket, Ticket, read_ref, ref_of

if TYPE_CHECKING:
    from .near_pixels import NearPixels

Verdict: TypeAlias = Medium | MediaError  # the medium, or why it can't be used
KNOWN = 1 << 17  # media in the index; the least recently used media are dropped
LAYOUTS = 1 << 19  # tokens of cached layouts; a token of media, with its four patches, takes about 84 bytes


@dataclasses.dataclass(frozen=True)
class _KnownMedium:
    stamp: str
    facts: Facts | None = None
    settings: str = ""  # the digest of the media settings by which `verdict` was decoded
    verdict: Verdict | None = None


class MediaIndex:
    """Sizes and verdicts of media, by the kind, path and cell of a `MediaRef`. Thread-safe."""

    def __init__(self) -> None:
        self._media = Recent[_KnownMedium](KNOWN)
        self._lock = threading.Lock()  # held while an entry is replaced

    def ref(self, media: Media) -> MediaRef:
        """Returns the reference of a medium. If the medium names no version of its file, the version is the one in the
        index. If the index has none, `ref_of` looks at the file, and may raise MediaError."""
        if media.stamp or media.data is not None:
            return ref_of(media)
        kind, path = media.kind.value, local(media.path)
        known = self._media.get((kind, path, media.cell))
        return ref_of(media) if known is None else MediaRef(kind, path, known.stamp, media.cell)

    def facts(self, ref: MediaRef) -> Facts | None:
        """Returns the medium's size, or None if the index does not have it."""
        return self._known(ref).facts

    def verdict(self, ref: MediaRef, settings: str) -> Verdict | None:
        """Returns the result of decoding the medium by settings with the digest `settings`, if the index has one."""
        known = self._known(ref)
        said = known.verdict if known.settings == settings else None
        return MediaError(ref.name, said.reason) if isinstance(said, MediaError) else said

    def medium(self, ref: MediaRef, settings: MediaSettings) -> tuple[Medium, bool] | None:
        """Returns the medium, and whether decoding or counting frames has confirmed its size. Returns None if the file
        must be read first. Raises MediaError for a medium that can't be used."""
        said = self.verdict(ref, settings.digest)
        if isinstance(said, MediaError):
            raise said
        if said is not None:
            return said, True
        facts = self.facts(ref)
        return None if facts is None else settings.medium_by(ref.kind, ref.name, facts)

    def note(self, ref: MediaRef, facts: Facts) -> None:
        """Adds facts about a medium. Facts from a header do not replace counted frames."""
        with self._lock:
            known = self._known(ref)
            if known.facts is None or facts.counted or not known.facts.counted:
                self._media.put(_key_of(ref), dataclasses.replace(known, facts=facts))

    def note_all(self, refs: Sequence[MediaRef], settings: str, found: Sequence[Ticket | MediaError]) -> None:
        """Adds a store's answers about media that were decoded by settings with the digest `settings`. Forgets a medium
        whose file has changed. Does not add errors that may pass (`MediaUnavailable`)."""
        for ref, said in zip(refs, found, strict=True):
            if isinstance(said, StaleTicket):
                self.forget(ref)
            elif not isinstance(said, MediaUnavailable):
                verdict = said.medium if isinstance(said, Ticket) else said
                with self._lock:
                    known = dataclasses.replace(self._known(ref), settings=settings, verdict=verdict)
                    self._media.put(_key_of(ref), known)

    def forget(self, ref: MediaRef) -> None:
        """Forgets a medium in all versions of its file."""
        self._media.drop(_key_of(ref))

    def _known(self, ref: MediaRef) -> _KnownMedium:
        known = self._media.get(_key_of(ref))
        return known if known is not None and known.stamp == ref.stamp else _KnownMedium(ref.stamp)


def _key_of(ref: MediaRef) -> tuple[str, str, str]:
    return ref.kind, ref.path, ref.cell


@dataclasses.dataclass(frozen=True)
class ProxyMedia:
    """Prepares the media of prompts without their pixels. The `index` has sizes and verdicts of media; the `store`
    decodes media, perhaps on other machines. `near` fetches pixels of expected prompts ahead. If `among` processes
    generate, this process fetches the pixels of every `among`-th draw. `layouts` caches the latest layouts of prompts,
    by tokens and media; prompts of equal tokens and sizes of media share one layout, whose arrays are read-only."""

    store: MediaStore
    index: MediaIndex
    near: NearPixels | None = None
    among: int = 1
    layouts: Recent[ModelInput] = dataclasses.field(default_factory=lambda: Recent(LAYOUTS, len))

    def expect(self, draw: int, inputs: PromptInput) -> None:
        """Tells `near` that this prompt will be drawn, after the prompts expected earlier. Does not block."""
        if self.near is not None and draw % self.among == 0:
            self.near.expect(rows_of(inputs))

    def pass_by(self, inputs: PromptInput) -> None:
        """Tells `near` that this prompt's pixels are no longer expected."""
        if self.near is not None:
            self.near.pass_by(rows_of(inputs))

    def outline(self, processor: Processor, token_ids: Sequence[int], prompt: Prompt, *, count: bool) -> PromptOutline:
        """Returns the sizes of a prompt, from the index or from headers of media. With `count`, counts the frames of
        videos whose size is not confirmed. Raises PromptError and MediaError."""
        found = [self._glance(processor, self.index.ref(medium), count) for medium in prompt.media]
        return processor.outline_of(token_ids, [medium for medium, _ in found], certain=all(sure for _, sure in found))

    def inputs(self, processor: Processor, token_ids: Sequence[int], prompt: Prompt) -> OutlinedInput:
        """Has the store measure a prompt's media, and returns the prompt's model input. Raises the MediaError of the
        first medium that can't be used."""
        tickets = self._tickets(processor, prompt.media)
        lay_out = functools.partial(self._laid_out, processor, *outlined(processor, token_ids, tickets))
        return OutlinedInput(lay_out(), lay_out)

    def response_inputs(self, processor: Processor, response: Response, start: int) -> ModelInput:
        """Returns the model input of a response with observations: see `Processor.response_layout`. Raises MediaError
        as `inputs`, and ValueError if media and placeholders do not match."""
        tickets = self._tickets(processor, response.media)
        media = [ticket.medium for ticket in tickets]
        return processor.lay_out_response(response.token_ids, media, _shadows(processor, tickets), start=start)

    def _tickets(self, processor: Processor, media: Sequence[Media]) -> list[Ticket]:
        refs = [self.index.ref(medium) for medium in media]
        found = self._look(processor, refs)
        if stale := [k for k, said in enumerate(found) if isinstance(said, StaleTicket)]:
            fresh = self._look(processor, [ref_of(media[k]) for k in stale])  # the index was out of date
            for k, said in zip(stale, fresh, strict=True):
                found[k] = said
        for said in found:
            if isinstance(said, MediaError):
                raise said
        return [said for said in found if isinstance(said, Ticket)]

    def _laid_out(self, processor: Processor, outline: PromptOutline, patches_PX: ShadowTensor | None) -> ModelInput:
        key = outline.token_ids.tobytes(), outline.media
        if (known := self.layouts.get(key)) is None:
            known = processor.lay_out(outline, patches_PX)
            for value in [*vars(known).values(), *vars(known.vision or known).values()]:
                if isinstance(value, np.ndarray):
                    value.setflags(write=False)
            self.layouts.put(key, known)
        return known.with_patches(patches_PX)

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
    """Returns the rows of tickets that a prompt has in the place of pixels."""
    patches = inputs.patches_PX
    return patches.elsewhere if isinstance(patches, ShadowTensor) else ()


def outlined(
    processor: Processor, token_ids: Sequence[int], tickets: Sequence[Ticket]
) -> tuple[PromptOutline, ShadowTensor | None]:
    """Returns the arguments of `Processor.lay_out` for a tokenised prompt with these media; no file is read. Raises
    PromptError or ValueError, as `lay_out` does, if prompt and media do not fit together."""
    if wrong := next((ticket for ticket in tickets if ticket.settings != processor.settings.digest), None):
        raise ValueError(f"{wrong.ref.name} was preprocessed with other media settings than this process has")
    return processor.outline_of(token_ids, [ticket.medium for ticket in tickets]), _shadows(processor, tickets)


def _shadows(processor: Processor, tickets: Sequence[Ticket]) -> Any:
    """Returns the shadow of the media's patches, in order; None without media."""
    shadows = [ticket.shadow(processor.settings.patch_bytes) for ticket in tickets]
    return np.concatenate(shadows) if shadows else None  # a shadow, too (`__array_function__`)
