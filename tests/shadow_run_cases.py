"""Media of many kinds for whole runs, and preprocessors of a run that are killed while it goes on."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np
from PIL import Image
from run_cases import filmed, write_jsonl

from fluxjax.run import pixels
from fluxjax.run.build import NoPixels

KILLS = 4  # in a run: one that dies six times in a row, with less than half a minute in between, ends it


def noise(file: pathlib.Path, height: int, width: int, seed: int) -> None:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(file)


def media(folder: pathlib.Path, *, bad: bool = True) -> dict[str, object]:
    """Sources for `configs/vlm.py` of pictures and clips of several sizes; the `bad` ones among them can't be used."""
    images = [f"{k}.png" for k in range(8)]
    videos = [f"{k}.mp4" for k in range(5)]
    for k, name in enumerate(images):
        noise(folder / name, 24 + 4 * (k % 3), 24 + 8 * (k % 2), k)
    for k, name in enumerate(videos):
        frames = np.random.default_rng(k).integers(0, 256, (4 + 3 * k, 32, 32, 3), np.uint8)
        filmed(folder / name, frames, g="4")  # a key frame every four
    good = {"digits": images[:2], "pans": videos[:2]}
    if bad:
        whole = (folder / videos[0]).read_bytes()
        (folder / "corrupt.mp4").write_bytes(b"\0" * 64 + whole[64:])
        (folder / "cut.png").write_bytes((folder / images[0]).read_bytes()[:200])
        Image.new("1", (9000, 9000)).save(folder / "bomb.png")  # a few kilobytes, more pixels than may be
        images = [*images, "cut.png", "bomb.png", "missing.png"]
        videos = [*videos, "corrupt.mp4"]
    made: dict[str, object] = {}
    for source, field, names in (("digits", "images", images), ("pans", "videos", videos)):

        def records(names: list[str], field: str = field) -> list[dict]:
            return [
                {"id": name, "prompt": "Which?", "answer": "Which"[k % 5], field: [name]}
                for k, name in enumerate(names)
            ]

        made[f"data__sources__{source}__path"] = write_jsonl(folder / f"{source}.jsonl", records(names))
        held_out = write_jsonl(folder / f"{source}-eval.jsonl", records(good[source]))
        made |= {f"data__sources__{source}__eval_path": held_out, f"data__sources__{source}__reward": "exact"}
        made[f"data__sources__{source}__weight"] = 1.0
    return made


@contextlib.contextmanager
def without_store() -> Iterator[None]:
    """Runs in this process decode whole prompts where they are drawn, and these keep their pixels: what runs with a
    store are compared with."""
    with mock.patch.object(pixels, "Pixels", lambda *_: NoPixels()):
        yield


# --- processes ----------------------------------------------------------------------------------


def descendants(pid: int) -> dict[int, str]:
    """The processes under this one, by id: their command lines."""
    parents: dict[int, int] = {}
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, fresh = set[int](), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    lines = {}
    for child in found:
        with contextlib.suppress(OSError):
            lines[child] = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return lines


def preprocessors(pid: int) -> list[int]:
    return sorted(child for child, line in descendants(pid).items() if " -m fluxjax.preprocess " in line)


def addresses(run_dir: pathlib.Path) -> int:
    """How often preprocessors of this run have begun to listen."""
    return sum(log.read_text().count('{"address"') for log in (run_dir / "preprocessors").rglob("*.log"))


class Killer:
    """Kills one preprocessor of the run after another, each at a random moment, as long as the run goes on. `seen` are
    all processes that the run had, `killed` those that were killed."""

    def __init__(self, process: subprocess.Popen, run_dir: pathlib.Path, count: int, seed: int) -> None:
        self._process, self._run_dir, self._count = process, run_dir, count
        self._random = random.Random(seed)
        self.killed: list[int] = []
        self.seen: dict[int, str] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while self._process.poll() is None and addresses(self._run_dir) < self._count:
            time.sleep(0.05)
        while self._process.poll() is None:
            time.sleep(self._random.uniform(0.05, 2.0))
            self.seen |= descendants(self._process.pid)
            alive = preprocessors(self._process.pid)
            if alive and len(self.killed) < KILLS:
                victim = self._random.choice(alive)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    self.killed.append(victim)
