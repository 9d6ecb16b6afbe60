"""Media files, stores of small bounds, and what the pixels must be, for tests of stores of media."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

from PIL import Image

from fluxjax.config.data import DataConfig
from fluxjax.data.local_store import GIB, LocalStore
from fluxjax.data.locations import stamp_of
from fluxjax.data.tickets import MediaRef, Ticket, read_ref
from models.processing.media import MediaSettings
from models.processing.settings import FrameSettings
from models.shadow import Rows

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "models"))
from media_files import LAYOUT, PIXELS, moving_frames, write_video

ROOT = pathlib.Path(__file__).parents[2]
TESTS = str(ROOT / "tests" / "data")
SETTINGS = MediaSettings(LAYOUT, PIXELS, PIXELS, FrameSettings(num_frames=12))
PAIR = 32 * 48 * 3 * 2  # bytes of a frame pair of the videos here
SLICED = {"slice_bytes": 2 * PAIR}  # slices of two frame pairs, so that these videos have three


def make_media(folder):
    """Two pictures, two videos, and what is none."""
    frames = moving_frames(16, 32, 48)
    Image.fromarray(frames[0]).save(folder / "a.png")
    Image.fromarray(frames[5][:, ::-1]).save(folder / "b.png")
    write_video(folder / "c.mp4", frames)
    write_video(folder / "d.mp4", frames[::-1])
    (folder / "e.png").write_bytes(b"no picture")
    return folder


def ref_of(path):
    return MediaRef("image" if path.suffix == ".png" else "video", str(path), stamp_of(str(path)))


def refs_of(folder):
    return [ref_of(path) for path in sorted(folder.glob("[a-d].*"))]


def small(cache):
    """Settings of a store that keeps so many bytes."""
    return DataConfig(cache_gib=cache / GIB)


@contextlib.contextmanager
def opened(config=None, workers=0, **options):
    store = LocalStore(SETTINGS, config or DataConfig(), workers=workers, **options)
    with contextlib.closing(store):
        yield store


def pixels(ref):
    medium, patches = SETTINGS.load(ref.kind, read_ref(ref))
    return medium, patches, SETTINGS.normalised(ref.kind, patches)


def whole(ticket):
    return Rows(str(ticket), 0, ticket.num_patches)


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
    return found


def alive(pids):
    return [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]


@contextlib.contextmanager
def running(script, folder):
    """A process of a Python script, in a session of its own; it is killed at the end."""
    (folder / "run.py").write_text(script)
    command, environment = [sys.executable, str(folder / "run.py")], os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def seen(store, refs) -> list[Ticket]:
    """The tickets of media none of which may be bad."""
    tickets = store.look(refs)
    assert not [error for error in tickets if isinstance(error, Exception)]
    return [ticket for ticket in tickets if isinstance(ticket, Ticket)]
