"""The media that this process knows: their sizes, and what decoding them has shown.

Media that are known are not looked at again: whoever decodes a file that has changed meanwhile finds out
(`StaleTicket`), and `forget` makes the next look one at the file. A newer file never gives its pixels to an older
ticket.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import TypeAlias

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.processing.media_file import Facts, MediaUnavailable, Medium

from ..base.types import Media
from .locations import local
from .media_cache import Recent
from .media_refs import ref_of
from .tickets import MediaRef, StaleTicket, Ticket

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
        if facts is None:
            return None
        try:
            return settings.medium_of(ref.kind, ref.name, facts), facts.counted
        except MediaError:
            if facts.counted:
                raise
            return None

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
