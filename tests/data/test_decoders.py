"""Processes that decode: what they decode is right, and one that hangs, dies or needs too much costs one file."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from PIL import Image
from store_cases import (
    PAIR,
    ROOT,
    SETTINGS,
    SLICED,
    TESTS,
    alive,
    make_media,
    moving_frames,
    opened,
    pixels,
    ref_of,
    refs_of,
    running,
    seen,
    small,
    until,
    whole,
    write_video,
)

from fluxjax.base import process_channel, worker_pool
from fluxjax.base.errors import DataError
from fluxjax.config.data import DataConfig
from fluxjax.data import local_store
from fluxjax.data.decoders import DecodeJob, DecoderPool, decoded
from fluxjax.data.local_store import LocalStore
from fluxjax.data.tickets import MediaRef, StaleTicket, Ticket, current_stamp
from models.processing import MediaError
from models.processing.media import MediaSettings
from models.processing.media_file import MediaUnavailable
from models.shadow import Rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_media(tmp_path_factory.mktemp("media"))


def children(parent=None):
    """The processes that decode for a process."""
    parent = parent or os.getpid()
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            status = (path / "stat").read_text().rpartition(")")[2].split()
            if (
                int(status[1]) == parent
                and status[0] != "Z"
                and b"fluxjax.base.worker_process" in (path / "cmdline").read_bytes()
            ):
                found.append(int(path.name))
    return found


def ended(pid):
    """Whether a child of this process can be waited for: one that is ending has no command any more, but lives."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as threads:
        yield threads


def test_processes_decode_what_threads_do_and_leave_nothing(folder):
    refs = [*refs_of(folder), ref_of(folder / "e.png")]
    before = open_files()
    with opened(small(cache=PAIR), workers=2, **SLICED) as store, opened() as other:
        found, expected = store.look(refs * 2), other.look(refs * 2)
        assert found[:4] == expected[:4] == found[5:9]
        assert str(found[4]) == str(expected[4]) == str(found[9])
        tickets = [ticket for ticket in found[:4] if isinstance(ticket, Ticket)]
        for _ in range(2):
            rows = [Rows(str(ticket), 3, ticket.num_patches - 1) for ticket in tickets]
            for patches, same in zip(store.fetch_bytes(rows), other.fetch_bytes(rows), strict=True):
                np.testing.assert_array_equal(patches, same)
        pids = children()
        assert 1 <= len(pids) <= 2
        stats = store.stats()
        assert (stats.queue_depth, stats.busy_workers, stats.killed_workers) == (0, 0, 0)
    assert not alive(pids) and not children() and open_files() == before
    with pytest.raises(RuntimeError, match="the workers of the store of media are closed"):
        store._decoders.decode(DecodeJob("a", "image", "a"), lambda *_: None)


@pytest.mark.medium
def test_many_pixels_are_mapped_and_few_are_sent(folder, monkeypatch):
    """A slice is its own memory: that of one which is evicted is free."""
    big = SETTINGS.image.__class__(min_pixels=1, max_pixels=2**24)
    settings = dataclasses.replace(SETTINGS, image=big)
    picture = folder / "large.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (1024, 2048, 3), np.uint8)).save(picture)
    expected = settings.load("image", str(picture))[1]
    assert expected.nbytes > process_channel.MAPPED_FROM
    maps = pathlib.Path("/proc/self/maps")
    with contextlib.closing(LocalStore(settings, DataConfig(), workers=1)) as store:
        (ticket,) = seen(store, [ref_of(picture)])
        (patches,) = store.fetch_bytes([whole(ticket)])
        np.testing.assert_array_equal(patches, expected)
        assert "memfd:fluxjax-media" in maps.read_text()
        with pytest.raises(ValueError, match="read-only"):
            patches[0] = 0
    np.testing.assert_array_equal(patches, expected)
    del patches
    assert "memfd:fluxjax-media" not in maps.read_text()


def test_bytes_reach_a_process(folder, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    url = "memory://decoders/c.mp4"
    fsspec.filesystem("memory").pipe(url, (folder / "c.mp4").read_bytes())
    with opened(workers=1) as store:
        (ticket,) = seen(store, [MediaRef("video", url, current_stamp(url))])
        np.testing.assert_array_equal(store.fetch_bytes([whole(ticket)])[0], pixels(ref_of(folder / "c.mp4"))[1])


@pytest.fixture
def killed_while_decoding(monkeypatch):
    """`killed_while_decoding(n)`: the next n processes that are given a file are killed before they have done it."""
    send, left = process_channel.Channel.send, []

    def sends(self, message, array=None, *, seconds=None):
        victims = children() if "argument" in message and left and left.pop() else []
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        send(self, message, array, seconds=seconds)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(process_channel.Channel, "send", sends)
    return lambda count: left.extend([True] * count)


def test_what_no_decoder_foresees_is_not_noted_of_the_file(monkeypatch):
    """It may be ours, or of a version: the index of media would keep it for ever."""

    def surprised(*_):
        raise TypeError("unknown argument")

    monkeypatch.setattr(MediaSettings, "load", surprised)
    with pytest.raises(MediaUnavailable, match="a: failed with TypeError: unknown argument"):
        decoded(SETTINGS, DecodeJob("a", "image", "a.png"))


@pytest.mark.medium
def test_a_process_that_is_killed_is_replaced_and_its_file_tried_again(folder, caplog, killed_while_decoding):
    with opened(workers=1) as store, caplog.at_level(logging.WARNING, "fluxjax.data"):
        refs = refs_of(folder)
        killed_while_decoding(1)
        assert seen(store, refs[2:3]) == [Ticket(refs[2], SETTINGS.digest, pixels(refs[2])[0])]
        assert store.stats().killed_workers == 1
        assert "c.mp4: decoding it ended the process (signal 9); it is tried once more" in caplog.text
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)  # while it has nothing to do
        until(lambda: ended(pid))
        seen(store, refs[3:4])
        assert store.stats().killed_workers == 2 and caplog.text.count("ended the process") == 1


@pytest.mark.medium
def test_a_file_whose_process_ends_twice_is_bad(folder, killed_while_decoding):
    """Another file is decoded as if nothing had been."""
    ref, other = refs_of(folder)[2:4]
    with opened(workers=1) as store:
        killed_while_decoding(2)
        for _ in range(2):
            (error,) = store.look([ref])
            assert isinstance(error, MediaError)
            assert str(error).endswith("c.mp4: decoding it ended the process (signal 9)")
            assert store.stats().killed_workers == 2
        seen(store, [other])


def test_a_file_that_takes_too_long_costs_its_process(folder, monkeypatch):
    monkeypatch.setattr(local_store, "DECODE_SECONDS", 1.0)
    config = DataConfig()
    with opened(config, workers=1) as store:
        refs = refs_of(folder)
        seen(store, refs[:1])
        (pid,) = children()
        os.kill(pid, signal.SIGSTOP)
        (error,) = store.look(refs[2:3])
        assert isinstance(error, MediaError)
        assert error.reason == "decoding took more than 1 s"
        assert not alive([pid]) and store.stats().killed_workers == 1
        assert str(store.look(refs[2:3])[0]) == str(error), "it is not tried again"
        seen(store, refs[3:4])


@pytest.mark.medium
def test_a_process_hangs_no_longer_than_its_run_lives_and_the_time_it_has(folder):
    """The run may be gone by the time that a file takes too long: then the system ends the process."""
    code = "from fluxjax.base import worker_process as w; w.GRACE = 0.2; " + (
        "w._answer(None, lambda job: [0 for _ in iter(int, 1)], {'number': 1, 'argument': None, 'seconds': 0.1})"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == -signal.SIGALRM


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gib"), [("bomb.png", 0.05), ("large.mp4", 0.02)])
def test_a_medium_that_needs_too_much_memory_costs_its_process(folder, tmp_path, name, gib, monkeypatch):
    large = tmp_path / name
    if name == "bomb.png":
        Image.new("RGB", (5000, 5000)).save(large)  # 75 MB, within the bound of pixels
    else:
        write_video(large, np.repeat(moving_frames(1, 1088, 1920), 12, axis=0), codec="mpeg4")
    monkeypatch.setattr(local_store, "DECODE_MEMORY_GIB", gib)
    with opened(DataConfig(), workers=1) as store:
        (error,) = store.look([ref_of(large)])
        assert isinstance(error, MediaError) and "GiB of memory" in error.reason, error
        if name == "bomb.png":
            assert error.reason == "decoding needs more than 0.05 GiB of memory"
            assert store.stats().killed_workers == 1
            assert str(store.look([ref_of(large)])[0]) == str(error) and store.stats().killed_workers == 1
        seen(store, refs_of(folder))


def test_a_file_that_changes_while_a_process_decodes_it_is_stale(folder, tmp_path, pool):
    path = tmp_path / "a.mp4"
    path.write_bytes((folder / "c.mp4").read_bytes())
    with opened(workers=1) as store:
        seen(store, refs_of(folder)[:1])
        kept = store.stats().memory_bytes
        (pid,) = children()
        os.kill(pid, signal.SIGSTOP)
        looking = pool.submit(store.look, [ref_of(path)])
        until(lambda: store.stats().busy_workers)
        path.write_bytes((folder / "d.mp4").read_bytes())
        os.utime(path, ns=(1, 1))
        os.kill(pid, signal.SIGCONT)
        assert isinstance(looking.result(60)[0], StaleTicket) and store.stats().memory_bytes == kept
        seen(store, [ref_of(path)])


def test_who_waits_for_pixels_goes_before_who_looks_ahead(folder, monkeypatch, pool):
    send, order = process_channel.Channel.send, []

    def sends(self, message, array=None, *, seconds=None):
        order.extend([message["argument"]["name"]] if "argument" in message else [])
        send(self, message, array, seconds=seconds)

    monkeypatch.setattr(process_channel.Channel, "send", sends)
    with opened(small(cache=0), workers=1) as store:
        refs = refs_of(folder)
        (ticket,) = seen(store, refs[:1])
        (pid,) = children()
        os.kill(pid, signal.SIGSTOP)
        order.clear()
        first = pool.submit(store.look, refs[1:2])
        until(lambda: store.stats().busy_workers == 1)
        second = pool.submit(store.look, refs[2:3])
        until(lambda: store.stats().queue_depth == 1)
        third = pool.submit(store.fetch, [whole(ticket)])
        until(lambda: store.stats().queue_depth == 2)
        os.kill(pid, signal.SIGCONT)
        wait((first, second, third), 60)
        assert order == [refs[number].name for number in (1, 0, 2)]


def test_closing_ends_what_is_being_decoded(folder, pool):
    store = LocalStore(SETTINGS, DataConfig(), workers=1)
    seen(store, refs_of(folder)[:1])
    pids = children()
    os.kill(pids[0], signal.SIGSTOP)
    looking = pool.submit(store.look, refs_of(folder)[1:])
    until(lambda: store.stats().busy_workers)
    store.close()
    error = looking.exception(60)
    assert not alive(pids) and not children()
    assert error is not None and not isinstance(error, MediaError)


def test_processes_that_cannot_be_started_are_an_error(folder, monkeypatch, tmp_path, capfd):
    (tmp_path / "fluxjax").mkdir()
    (tmp_path / "fluxjax" / "__init__.py").write_text("raise ImportError('it is broken')")
    monkeypatch.setattr(worker_pool, "ROOT", tmp_path)
    with (
        opened(workers=1) as store,
        pytest.raises(DataError, match=r"data\.workers: a process that decodes can't be started: exit code 1"),
    ):
        store.look(refs_of(folder)[:1])
    assert "it is broken" in capfd.readouterr().err


RUN = """
import sys, time
sys.path.insert(0, {tests!r})
import store_cases, pathlib, threading, os, signal
store = store_cases.LocalStore(store_cases.SETTINGS, store_cases.small(cache=0), workers=2)
refs = store_cases.refs_of(pathlib.Path({folder!r}))
store.look(refs)
signal.signal(signal.SIGINT, lambda *_: print(len([t for t in store.look(refs) if hasattr(t, "ref")]), flush=True))
print("ready", flush=True)  # only now: a signal before would be lost
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_ctrl_c_is_the_runs_and_a_run_that_is_killed_leaves_nothing(folder, tmp_path):
    """A script without `if __name__ == "__main__":`, too."""
    with running(RUN.format(tests=TESTS, folder=str(folder)), tmp_path) as run:
        assert run.stdout.readline() == "ready\n"
        pids = until(lambda: children(run.pid))
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # as Slurm does
        assert run.stdout.readline() == "4\n" and children(run.pid) == pids
    until(lambda: not alive(pids))


def test_a_process_ends_with_its_run_though_it_is_busy():
    code = "import sys, threading, time; from fluxjax.base.worker_process import end_with_run; " + (
        "end_with_run(int(sys.argv[1])); print(flush=True); time.sleep(600)"
    )
    here, there = socket.socketpair()
    with there:
        command = [sys.executable, "-c", code, str(there.fileno())]
        busy = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, pass_fds=[there.fileno()])
    with busy:
        assert busy.stdout.readline() and busy.poll() is None
        here.close()
        try:
            assert busy.wait(60) == 1
        finally:
            busy.kill()


def test_a_process_that_decodes_does_without_jax():
    code = "import sys, fluxjax.data.decoders; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_without_room_in_memory_pixels_are_sent(monkeypatch):
    """Where there is no nameless memory, and the temporary folder is full."""
    monkeypatch.setattr(process_channel, "MAPPED_FROM", 1)
    patches = np.arange(256, dtype=np.uint8).reshape(4, 64)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    here, there = (process_channel.Channel(end) for end in socket.socketpair())
    with contextlib.closing(here), contextlib.closing(there):
        for broken in (None, "write", "memfd_create", "no memfd_create"):
            with monkeypatch.context() as patch:
                if broken == "no memfd_create":
                    patch.delattr(os, "memfd_create")
                elif broken:
                    patch.setattr(os, broken, refuse)
                here.send({"a": 1}, patches)
            message, received = there.receive(10.0)
            assert message["a"] == 1
            np.testing.assert_array_equal(received, patches)
        with pytest.raises(TimeoutError):
            there.receive(0.05)
        here.close()
        with pytest.raises(EOFError):
            there.receive(10.0)


def test_pools_decode_at_once_as_many_files_as_there_are_processes(folder, pool):
    together: Any = threading.Barrier(2)
    jobs = [DecodeJob(ref.name, ref.kind, ref.path) for ref in refs_of(folder)[:2]]
    with contextlib.closing(DecoderPool(SETTINGS, 2, seconds=60.0, memory_gib=8.0)) as decoders:
        media = list(pool.map(lambda job: decoders.decode(job, lambda *_: together.wait(60)), jobs))
    assert media == [pixels(ref)[0] for ref in refs_of(folder)[:2]]


def test_what_decoding_shows_of_a_video_comes_back_from_the_process(folder):
    """Slices that had to go are decoded by seeking, whoever has decoded the whole."""
    with opened(workers=1) as store:
        (ticket,) = seen(store, [ref_of(folder / "c.mp4")])
    assert ticket.medium.seekable and Ticket.parse(str(ticket)).medium.seekable
