"""Media, a plain store of decoded media, and preprocessors as real processes, for tests of Arrow Flight."""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from forked import ROOT, forked
from PIL import Image

from fluxjax.data.locations import stamp_of
from fluxjax.data.tickets import MediaRef, StaleTicket, Ticket
from models.config import PatchLayout
from models.processing import MediaError
from models.processing.media import MediaSettings
from models.processing.settings import PixelSettings
from models.shadow import Rows

SETTINGS = MediaSettings(PatchLayout(), PixelSettings(28 * 28, 56 * 56), PixelSettings(28 * 28, 56 * 56))
OTHERS = MediaSettings(PatchLayout(), PixelSettings(28 * 28, 112 * 112), PixelSettings(28 * 28, 56 * 56))


@dataclasses.dataclass
class Counts:
    decoded: int


class PlainStore:
    """Decodes in the thread that asks, and keeps everything. `slow` seconds are added to each medium."""

    def __init__(self, settings: MediaSettings, slow: float = 0.0) -> None:
        self._settings, self._slow = settings, slow
        self._kept: dict[tuple[str, str, str, str], tuple[Ticket, np.ndarray]] = {}
        self._decoded = 0
        self._lock = threading.Lock()

    def _load(self, ref: MediaRef) -> tuple[Ticket, np.ndarray]:
        key = (ref.kind, ref.path, ref.stamp, ref.cell)
        with self._lock:
            known = self._kept.get(key)
        if known is None:
            try:
                stamp = stamp_of(ref.path)
            except OSError as error:
                raise MediaError(ref.name, f"cannot be read: {error.strerror}") from None
            if stamp != ref.stamp:
                raise StaleTicket(ref.name, "has changed")
            if "broken store" in ref.path:
                raise RuntimeError("this store is broken")
            time.sleep(self._slow)
            medium, patches = self._settings.load(ref.kind, ref.path)
            known = Ticket(ref, self._settings.digest, medium), patches
            with self._lock:
                self._decoded += 1
                self._kept[key] = known
        return known

    def look(self, refs: Sequence[MediaRef]) -> list[Ticket | MediaError]:
        def look(ref: MediaRef) -> Ticket | MediaError:
            try:
                return self._load(ref)[0]
            except MediaError as error:
                return error

        return [look(ref) for ref in refs]

    def fetch_bytes(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        return [self._load(Ticket.parse(piece.ticket).ref)[1][piece.start : piece.stop] for piece in rows]

    def fetch(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        kinds = [Ticket.parse(piece.ticket).ref.kind for piece in rows]
        return [self._settings.normalised(*pair) for pair in zip(kinds, self.fetch_bytes(rows), strict=True)]

    def stats(self) -> Counts:
        return Counts(self._decoded)

    def close(self) -> None: ...


def pictures(folder: pathlib.Path, count: int, seed: int = 0) -> list[MediaRef]:
    """References to new pictures of several sizes."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    refs = []
    for number in range(count):
        path = folder / f"{number}.png"
        height, width = random.integers(28, 80, 2)
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        refs.append(MediaRef("image", str(path), stamp_of(str(path))))
    return refs


def all_rows(tickets) -> list[Rows]:
    return [Rows(str(ticket), 0, ticket.num_patches) for ticket in tickets]


def check(store, refs, tickets: Sequence[Any] | None = None) -> None:
    """The pixels and tickets of the store are those of direct decoding; by default, the tickets that it gives now."""
    direct, tickets = PlainStore(SETTINGS), store.look(refs) if tickets is None else tickets
    assert tickets == direct.look(refs)
    for ours, theirs in zip(store.fetch(all_rows(tickets)), direct.fetch(all_rows(tickets)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Process:
    """A preprocessor of plain stores; see `preprocess_process.py`."""

    def __init__(self, *flags: str, token: str = "", **settings: Any) -> None:
        words = [sys.executable, str(ROOT / "tests" / "preprocess_process.py"), json.dumps(settings), *flags]
        environment = {**os.environ, "FLUXJAX_TOKEN": token, "PYTHONPATH": str(ROOT)}
        self.process = forked(words, stdout=subprocess.PIPE, env=environment, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0], "the preprocessor does not start"
        line = self.process.stdout.readline()
        assert line, f"the preprocessor ended with {self.process.wait(10)}"
        self.address = json.loads(line)["address"]

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> int:
        self.send(signal.SIGCONT)
        self.send(number)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(20)


@contextlib.contextmanager
def processes(count: int = 1, **settings: Any) -> Iterator[list[Process]]:
    """Preprocessors, which the caller may replace in the list; all are ended."""
    started: list[Process] = []
    try:
        started += [Process(**settings) for _ in range(count)]
        yield started
    finally:
        for process in started:
            process.end()
