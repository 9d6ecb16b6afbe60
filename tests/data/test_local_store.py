"""The local store gives the pixels that its settings make of a file, wherever they lie and however little it holds."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import PAIR, SETTINGS, SLICED, make_media, opened, pixels, ref_of, refs_of, seen, small, whole
from turns import third_of

from fluxjax.data.tickets import MediaRef, MediaStore, StaleTicket, Ticket
from models.processing import MediaError
from models.processing.media import MediaSettings
from models.shadow import Rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_media(tmp_path_factory.mktemp("media"))


def test_it_gives_what_the_settings_make_of_each_file(folder):
    refs = refs_of(folder)
    with opened(**SLICED) as store:
        assert isinstance(store, MediaStore)
        tickets = seen(store, refs)
        for ref, ticket in zip(refs, tickets, strict=True):
            medium, patches, floats = pixels(ref)
            assert ticket == Ticket(ref, SETTINGS.digest, medium)
            for start, stop in ((0, len(patches)), (3, 5), (7, len(patches) - 1), (2, 2), (len(patches), len(patches))):
                rows = [Rows(str(ticket), start, stop)]
                np.testing.assert_array_equal(store.fetch(rows)[0], floats[start:stop])
                np.testing.assert_array_equal(store.fetch_bytes(rows)[0], patches[start:stop])
        assert store.fetch([whole(ticket) for ticket in tickets])[2].dtype == np.float32
        stats = store.stats()
        assert (stats.decoded_media, stats.misses, stats.bad_media) == (4, 0, 0)
        assert stats.decoded_frames == 2 * 1 + 2 * 12 and stats.decoded_patches == 2 * 24 + 2 * 6 * 24
        assert stats.memory_bytes == stats.decoded_patches * SETTINGS.patch_bytes


def test_bytes_are_what_is_kept_itself_and_nobody_can_change_it(folder):
    with opened() as store:
        (ticket,) = seen(store, refs_of(folder)[:1])
        first, second = store.fetch_bytes([whole(ticket)] * 2)
        assert np.shares_memory(first, second)
        with pytest.raises(ValueError, match="read-only"):
            first[0] = 0


def test_a_bad_file_is_an_error_among_results_and_not_tried_again(folder):
    refs = [ref_of(folder / "e.png"), ref_of(folder / "a.png")]
    with opened() as store:
        for _ in range(3):
            error, ticket = store.look(refs)
            assert isinstance(error, MediaError) and isinstance(ticket, Ticket)
            assert str(error).startswith(f"{folder / 'e.png'}: not an image in a known format")
        assert store.stats().bad_media == 1


def test_an_error_of_the_moment_is_tried_again(folder, tmp_path):
    missing = MediaRef("image", str(tmp_path / "x.png"), "1-1")
    os.mkfifo(tmp_path / "fifo.png")
    with opened() as store:
        for error in store.look([missing, ref_of(tmp_path / "fifo.png")]):
            assert isinstance(error, MediaError)
        (tmp_path / "x.png").write_bytes((folder / "a.png").read_bytes())
        assert isinstance(store.look([ref_of(tmp_path / "x.png")])[0], Ticket)


def test_files_of_the_same_content_share_what_was_decoded(folder, tmp_path):
    copy = tmp_path / "copy.mp4"
    copy.write_bytes((folder / "c.mp4").read_bytes())
    with opened() as store:
        one, other = seen(store, [ref_of(folder / "c.mp4"), ref_of(copy)])
        assert one.medium == other.medium and store.stats().decoded_media == 1
        first, second = store.fetch_bytes([whole(one), whole(other)])
        assert np.shares_memory(first, second)


def test_a_file_that_has_changed_is_stale_whether_or_not_it_was_kept(folder, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes((folder / "a.png").read_bytes())
    ref = ref_of(path)
    with opened() as store, opened() as other:
        (ticket,) = seen(store, [ref])
        path.write_bytes((folder / "b.png").read_bytes())
        os.utime(path, ns=(1, 1))
        for each in (store, other):
            assert isinstance(each.look([ref])[0], StaleTicket)
            with pytest.raises(StaleTicket, match="has changed"):
                each.fetch([whole(ticket)])
        (again,) = seen(store, [ref_of(path)])
        np.testing.assert_array_equal(store.fetch_bytes([whole(again)])[0], pixels(ref_of(folder / "b.png"))[1])
        path.unlink()
        with pytest.raises(MediaError, match="no such file"):
            store.fetch([whole(again)])


def test_a_file_that_changes_while_it_is_decoded_is_stale_and_nothing_of_it_is_kept(folder, tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes((folder / "a.png").read_bytes())
    load = MediaSettings.load

    def changing(self, kind, source):
        path.write_bytes((folder / "b.png").read_bytes())
        os.utime(path, ns=(1, 1))
        return load(self, kind, source)

    with opened() as store:
        with monkeypatch.context() as patch:
            patch.setattr(MediaSettings, "load", changing)
            assert isinstance(store.look([ref_of(path)])[0], StaleTicket)
        assert store.stats().memory_bytes == 0
        tickets = seen(store, [ref_of(folder / "a.png"), ref_of(path)])
        for ticket in tickets:
            np.testing.assert_array_equal(store.fetch_bytes([whole(ticket)])[0], pixels(ticket.ref)[1])


def test_tickets_that_it_cannot_answer_are_refused_with_the_reason(folder):
    with opened() as store:
        (ticket,) = seen(store, refs_of(folder)[:1])
        rows = whole(ticket)
        with pytest.raises(MediaError, match=r"its ticket has the media settings 0000"):
            store.fetch([Rows(str(Ticket(ticket.ref, "0000", ticket.medium)), 0, 1)])
        with pytest.raises(MediaError, match="rows 0 to 99 were asked for, but it has 24 patches"):
            store.fetch([Rows(rows.ticket, 0, 99)])
        with pytest.raises(MediaError, match="is no ticket"):
            store.fetch([Rows("[1]", 0, 1)])
        forged = Ticket(ticket.ref, ticket.settings, type(ticket.medium)("image", (1, 2, 12)))
        with pytest.raises(MediaError, match="has changed since it was preprocessed"):
            store.fetch([whole(forged)])


def test_a_ticket_is_answered_by_a_store_that_has_not_looked(folder):
    with opened(**SLICED) as store, opened(**SLICED) as other:
        tickets = seen(store, refs_of(folder))
        for ticket in tickets:
            middle = Rows(str(ticket), ticket.num_patches // 2, ticket.num_patches // 2 + 5)
            np.testing.assert_array_equal(other.fetch([middle])[0], store.fetch([middle])[0])
        assert other.stats().decoded_patches == 2 * 24 + 2 * 48, "of a video only the slice that was asked for"


KEPT = st.sampled_from([0, PAIR // 2, PAIR, 3 * PAIR, 8 * PAIR])
STEPS = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.floats(0, 1)) | st.integers(0, 3), max_size=12)


@settings(max_examples=third_of(30))
@given(cache=KEPT, steps=STEPS)
def test_under_any_bound_the_pixels_are_right_and_the_bound_is_kept(folder, cache, steps):
    refs = refs_of(folder)
    expected = [pixels(ref) for ref in refs]
    with opened(small(cache), **SLICED) as store:
        for step in steps:
            if isinstance(step, int):
                assert store.look([refs[step]]) == [Ticket(refs[step], SETTINGS.digest, expected[step][0])]
            else:
                medium, patches, _ = expected[step[0]]
                start, stop = sorted(round(bound * len(patches)) for bound in step[1:])
                ticket = str(Ticket(refs[step[0]], SETTINGS.digest, medium))
                found = store.fetch_bytes([Rows(ticket, start, stop)])[0]
                np.testing.assert_array_equal(found, patches[start:stop])
            assert store.stats().memory_bytes <= cache


def test_what_was_handed_out_stays_though_it_is_evicted(folder):
    with opened(small(PAIR), **SLICED) as store:
        tickets = seen(store, refs_of(folder))
        held = store.fetch_bytes([whole(ticket) for ticket in tickets])
        for ticket, patches in zip(tickets, held, strict=True):
            np.testing.assert_array_equal(patches, pixels(ticket.ref)[1])


def test_a_slice_does_not_keep_the_whole_medium_in_memory(folder):
    with opened(**SLICED) as store:
        (ticket,) = seen(store, refs_of(folder)[2:3])
        (patches,) = store.fetch_bytes([Rows(str(ticket), 0, 5)])
        assert patches.base.nbytes == 2 * PAIR


def test_threads_that_want_the_same_medium_wait_for_one_decoding(folder, monkeypatch):
    """All begin together, and the decoding waits until they have."""
    count, load, together = 6, MediaSettings.load, threading.Barrier(7)
    loads = []

    def counted(self, kind, source):
        loads.append(source)
        together.wait(30)
        return load(self, kind, source)

    monkeypatch.setattr(MediaSettings, "load", counted)
    ref = ref_of(folder / "a.png")
    with opened() as store, ThreadPoolExecutor(2 * count) as pool:
        looking = [pool.submit(store.look, [ref]) for _ in range(count)]
        for _ in range(count - 1):
            pool.submit(together.wait, 30)
        together.wait(30)
        found = [future.result(30)[0] for future in looking]
        assert all(ticket == found[0] for ticket in found) and len(loads) == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_many_threads_under_small_bounds_get_right_pixels(folder, workers):
    expected = [pixels(ref) for ref in refs_of(folder)]

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(15):
            which = rng.integers(4)
            medium, patches, _ = expected[which]
            start, stop = sorted(rng.integers(0, len(patches) + 1, 2))
            ticket = Ticket(refs_of(folder)[which], SETTINGS.digest, medium)
            assert store.look([ticket.ref]) == [ticket]
            rows = [Rows(str(ticket), int(start), int(stop)), whole(ticket)]
            for found, (low, high) in zip(store.fetch_bytes(rows), ((start, stop), (0, None)), strict=True):
                np.testing.assert_array_equal(found, patches[low:high])

    with opened(small(3 * PAIR), workers, **SLICED) as store, ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6), timeout=120))
        assert store.stats().memory_bytes <= 3 * PAIR
