"""The index of known media, kept between runs: their sizes, and what decoding them has shown.

A run that finds its media here touches none of their files. The folder tells whether a file is still the known one: its
time of last change (ctime), which is read once, changes with each file that is added, renamed or replaced. It does not
change where a file was written over in its place: whoever decodes that file finds out (`StaleTicket`), as with URLs,
which have no folders to ask. So old sizes may be believed, and cost an error that names the file; `forget` makes the
next run look again. A newer file never gives its pixels to an older ticket.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import time
from collections.abc import Sequence
from typing import TypeAlias

import msgpack

from models.processing import MediaError
from models.processing.facts import Facts
from models.processing.media import MediaSettings
from models.processing.media_file import MediaUnavailable
from models.processing.outline import Medium

from ..base.process import cache_folder
from ..base.types import Media
from .index_file import Change, IndexFile
from .locations import is_url, local, parent
from .media_refs import ref_of
from .tickets import MediaRef, StaleTicket, Ticket

Verdict: TypeAlias = Medium | MediaError  # what decoding showed: the medium, or why it can't be used
VERDICTS = 4  # settings whose verdicts are kept of a medium: the latest
REASON = 160  # characters kept of an error
SETTLED = 2.0  # seconds without a change from which on a folder's time says that there was none: clocks are coarse
_NEVER, _ALWAYS = 0, 1  # in the place of a folder's time: it is not believed; there is nothing to ask


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A medium in one version of its file."""

    stamp: str
    folder: int = _NEVER  # the time of the folder's last change, ns
    facts: Facts | None = None
    verdicts: tuple[tuple[str, Medium | str], ...] = ()  # by the digest of settings: the medium, or why there is none

    def pack(self) -> bytes:
        facts = self.facts and dataclasses.astuple(self.facts)
        verdicts = [
            [digest, said if isinstance(said, str) else [said.kind, *said.grid, said.seconds_per_grid]]
            for digest, said in self.verdicts
        ]
        return msgpack.Packer().pack([self.stamp, self.folder, facts, verdicts])

    @classmethod
    def unpack(cls, data: bytes) -> _Entry:
        stamp, folder, facts, verdicts = msgpack.unpackb(data)
        media = ((digest, said if isinstance(said, str) else _medium(*said)) for digest, said in verdicts)
        return cls(stamp, folder, facts and Facts(*facts), tuple(media))


def _medium(kind: str, pairs: int, rows: int, columns: int, seconds: float) -> Medium:
    return Medium(kind, (pairs, rows, columns), seconds)


class MediaIndex:
    """The index in a folder, by default in the user's cache. Read and written from any thread, by any number of
    processes."""

    def __init__(self, folder: str | os.PathLike[str] = "") -> None:
        self._file = IndexFile(pathlib.Path(folder).expanduser() if folder else cache_folder() / "media")
        self._folders: dict[str, int] = {}  # times of their last change, from before any of their files was looked at

    def ref(self, media: Media) -> MediaRef:
        """The reference of a medium: the known one, without a look at the medium's file, or else as `ref_of` makes it.
        Raises MediaError as `ref_of` does."""
        if media.stamp or media.data is not None:
            return ref_of(media)
        path = local(media.path)
        folder = self._folder(path)
        key = _key(media.kind.value, path, media.cell)
        known = self._entry(key)
        if known is not None and known.folder == folder != _NEVER:
            return MediaRef(media.kind.value, path, known.stamp, media.cell)
        ref = ref_of(media)
        if known is not None and known.stamp == ref.stamp and folder != _NEVER:
            self.note(ref)
        return ref

    def facts(self, ref: MediaRef) -> Facts | None:
        """The medium's size, if it is known."""
        known = self._known(ref)
        return known and known.facts

    def verdict(self, ref: MediaRef, settings: str) -> Verdict | None:
        """The result of decoding by the settings of this digest: the medium, or why it can't be used. None: not
        known."""
        known = self._known(ref)
        for digest, said in known.verdicts if known else ():
            if digest == settings:
                return MediaError(ref.name, said) if isinstance(said, str) else said
        return None

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

    def note(
        self,
        ref: MediaRef,
        *,
        facts: Facts | None = None,
        settings: str = "",
        verdict: Medium | MediaError | None = None,
    ) -> None:
        """Adds facts about a medium, or a verdict by the settings of this digest."""
        if isinstance(verdict, StaleTicket):
            self.forget(ref)
        else:
            self._file.update({_key_of(ref): self._change(ref, facts, settings, verdict)})

    def note_all(self, refs: Sequence[MediaRef], settings: str, found: Sequence[Ticket | MediaError]) -> None:
        """Adds the answers of a store that was asked to look at media."""
        changes: dict[bytes, Change] = {}
        for ref, said in zip(refs, found, strict=True):
            verdict = said.medium if isinstance(said, Ticket) else said
            stale = isinstance(verdict, StaleTicket)
            changes[_key_of(ref)] = _forgotten if stale else self._change(ref, None, settings, verdict)
        self._file.update(changes)

    def forget(self, ref: MediaRef) -> None:
        """Forgets a medium, whatever the version of its file, so that its file is looked at again."""
        self._file.update({_key_of(ref): _forgotten})

    def close(self) -> None:
        self._file.close()

    def _change(self, ref: MediaRef, facts: Facts | None, settings: str, verdict: Verdict | None) -> Change:
        """Returns the function that changes a medium's entry. Errors that may pass (`MediaUnavailable`) are not
        kept."""
        folder = self._folders.get(parent(ref.path), _NEVER) if not is_url(ref.path) else _ALWAYS
        said = verdict.reason[:REASON] if isinstance(verdict, MediaError) else verdict

        def change(data: bytes | None) -> bytes:
            entry = _Entry(ref.stamp) if data is None else _Entry.unpack(data)
            if entry.stamp != ref.stamp:
                entry = _Entry(ref.stamp)
            known, verdicts = entry.facts, entry.verdicts
            if facts is not None and (known is None or facts.counted or not known.counted):
                known = facts
            if said is not None and not isinstance(verdict, MediaUnavailable):
                of_other_settings = tuple(item for item in verdicts if item[0] != settings)
                verdicts = ((settings, said), *of_other_settings)[:VERDICTS]
            return _Entry(ref.stamp, folder or entry.folder, known, verdicts).pack()

        return change

    def _entry(self, key: bytes) -> _Entry | None:
        data = self._file.get(key)
        return None if data is None else _Entry.unpack(data)

    def _known(self, ref: MediaRef) -> _Entry | None:
        entry = self._entry(_key_of(ref))
        return entry if entry is not None and entry.stamp == ref.stamp else None

    def _folder(self, path: str) -> int:
        """The time of the last change of a file's folder, as it was when this process first asked."""
        if is_url(path):
            return _ALWAYS
        folder = parent(path)
        if folder not in self._folders:
            try:
                changed = os.stat(folder).st_ctime_ns
            except OSError:
                changed = _NEVER
            self._folders[folder] = changed if time.time_ns() - changed > SETTLED * 1e9 else _NEVER
        return self._folders[folder]


def _forgotten(_: bytes | None) -> None:
    return None


def _key_of(ref: MediaRef) -> bytes:
    return _key(ref.kind, ref.path, ref.cell)


def _key(kind: str, path: str, cell: str) -> bytes:
    name = "\0".join((kind, path, cell)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(name, digest_size=16).digest()
