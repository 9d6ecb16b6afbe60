"""Media by reference: files, parquet cells and URLs, read in the version that was referred to or not at all."""

import asyncio
import contextlib
import functools
import http.server
import io
import json
import os
import threading

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.core import url_to_fs
from PIL import Image

from fluxjax.base.errors import DataError
from fluxjax.base.types import Media, MediaKind
from fluxjax.config import Config
from fluxjax.data.loader import PromptLoader, open_source
from fluxjax.data.locations import joined, parent, stem, suffix
from fluxjax.data.prepare import Preparer
from fluxjax.data.tickets import MediaRef, StaleTicket, check_ref, read_ref, ref_of, source_of
from models.config import PatchLayout
from models.processing import MediaError, tiny
from models.processing.media_file import MediaUnavailable


@pytest.fixture
def memory():
    """A folder that is in the memory of this process, by its URL."""
    system = fsspec.filesystem("memory")
    yield "memory://media"
    if system.exists("/media"):
        system.rm("/media", recursive=True)


@pytest.fixture
def server(tmp_path):
    """The URL under which a server shows a folder."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def image(path):
    return Media(MediaKind.IMAGE, str(path))


def put(path, data):
    system, place = url_to_fs(path)
    system.pipe_file(place, data)


def put_table(path, rows, row_group_size=None):
    file = io.BytesIO()
    pq.write_table(rows, file, row_group_size=row_group_size)
    put(path, file.getvalue())


def test_a_local_file(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"abc")
    ref = ref_of(image(path))
    assert ref == ref_of(image(f"file://{path}")) and (ref.kind, ref.path, ref.cell) == ("image", str(path), "")
    assert read_ref(ref) == source_of(image(path)) == str(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(StaleTicket, match=r"a.png: has changed \(it is version 3-1, not 3-\d+\)"):
        read_ref(ref)
    path.unlink()
    for use in (read_ref, check_ref):
        with pytest.raises(MediaUnavailable, match=r"a.png: no such file"):
            use(ref)
    with pytest.raises(MediaUnavailable, match=r"a.png: no such file"):
        ref_of(image(path))


def test_bytes_that_are_in_no_file_have_no_reference():
    media = Media(MediaKind.IMAGE, "mine", b"abc")
    assert source_of(media) == b"abc"
    with pytest.raises(MediaError, match=r"mine: is in no file"):
        ref_of(media)


@pytest.mark.parametrize("where", ["memory", "web server"])
def test_a_url(memory, server, where):
    folder, address = server if where == "web server" else (memory, memory)
    name = "a.png" if where == "web server" else "a b#1.png"
    url = f"{address}/{name}"
    put(f"{folder}/{name}", b"abc")
    if where == "web server":  # which tells times in whole seconds
        os.utime(folder / name, (1_000_000, 1_000_000))
    ref = ref_of(image(url))
    assert read_ref(ref) == source_of(image(url)) == b"abc" and ref.path == url
    put(f"{folder}/{name}", b"xyz")
    with pytest.raises(StaleTicket, match="has changed"):
        read_ref(ref)
    with pytest.raises(MediaUnavailable, match=rf"{address}/gone.png: no such file"):
        ref_of(image(f"{address}/gone.png"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/a.png", r"^s3://bucket/a.png: cannot be read: Install s3fs to access S3 \(pip install s3fs\)$"),
        ("nope://a.png", "^nope://a.png: cannot be read: Protocol not known: nope$"),
        ("http://127.0.0.1:9/a.png", "^http://127.0.0.1:9/a.png: (no such file|cannot be read)"),
    ],
)
def test_a_url_that_cannot_be_read_says_what_to_do(url, message):
    with pytest.raises(MediaUnavailable, match=message):
        ref_of(image(url))


def test_manifests_that_cannot_be_read_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"data.sources.s: s3://b/m.jsonl cannot be read: .* \(pip install s3fs\)"):
        open_source("s3://b/m.jsonl", "s")
    with pytest.raises(DataError, match=r"data.sources.s: memory://nowhere/m.jsonl does not exist$"):
        open_source("memory://nowhere/m.jsonl", "s")


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def table(rows, tag=b""):
    items = [[{"bytes": b"%d/%d%s" % (row, i, tag), "path": "x.png"} for i in range(row % 3)] for row in range(rows)]
    return pa.table(
        {"images": pa.array(items, pa.list_(STRUCT)), "problem": ["?"] * rows, "answer": [str(i) for i in range(rows)]}
    )


@pytest.mark.parametrize("where", ["local", "memory"])
def test_cells_of_a_parquet_file(tmp_path, memory, where):
    path = str(tmp_path / "t.parquet") if where == "local" else f"{memory}/t.parquet"
    put_table(path, table(20), 4)
    source = open_source(path, "s")
    assert [prompt.id for prompt in map(source.__getitem__, range(3))] == ["t:0", "t:1", "t:2"]
    for row in (17, 2, 5, 17, 8):
        refs = [ref_of(media) for media in source[row].media]
        assert [ref.name for ref in refs] == [f"{path}#images/{row}/{i}" for i in range(row % 3)]
        assert [read_ref(ref) for ref in refs] == [b"%d/%d" % (row, i) for i in range(row % 3)]
    old = ref_of(source[14].media[0])
    put_table(path, table(20, b"new"), 4)
    with pytest.raises(StaleTicket, match=r"t.parquet#images/14/0: has changed"):
        read_ref(old)
    assert read_ref(ref_of(open_source(path, "s")[14].media[0])) == b"14/0new"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("images", "'images' does not name a cell as COLUMN/ROW/INDEX"),
        ("images/x/0", "'images/x/0' does not name a cell"),
        ("images/20/0", "the file has no row 20"),
        ("images/2/2", "row 2 has no item 2 in 'images'"),
        ("problem/2/0", "holds no bytes"),
        ("problem/2/1", "row 2 has no item 1 in 'problem'"),
        ("pictures/2/0", "the file has no column 'pictures'"),
    ],
)
def test_a_cell_that_is_not_there(tmp_path, cell, message):
    pq.write_table(table(20), tmp_path / "t.parquet")
    stamp = ref_of(image(tmp_path / "t.parquet")).stamp
    with pytest.raises(MediaError, match=message):
        read_ref(MediaRef("image", str(tmp_path / "t.parquet"), stamp, cell))


def lines(*records):
    return "\n".join(map(json.dumps, records)).encode()


def test_a_manifest_by_url_and_media_relative_to_it(memory, tmp_path):
    record = {"prompt": "?", "answer": "1", "images": ["a.png", "../b.png", "memory://media/c.png", "/d.png"]}
    put(f"{memory}/set/m.jsonl", lines(record))
    (prompt,) = open_source(f"{memory}/set/m.jsonl", "s")
    names = ["memory://media/set/a.png", "memory://media/b.png", "memory://media/c.png", "/d.png"]
    assert [media.path for media in prompt.media] == names
    (tmp_path / "m.jsonl").write_bytes(lines(record | {"images": ["memory://media/c.png", "file:///d.png", "e.png"]}))
    for path in (tmp_path / "m.jsonl", f"file://{tmp_path}/m.jsonl"):
        (prompt,) = open_source(path, "s")
        assert [media.path for media in prompt.media] == ["memory://media/c.png", "/d.png", f"{tmp_path}/e.png"]
    put(f"{memory}/bad.jsonl", b"{}")
    with pytest.raises(DataError, match=r"memory://media/bad.jsonl:1: no prompt field"):
        open_source(f"{memory}/bad.jsonl", "s")


@pytest.mark.parametrize(
    ("folder", "path", "name"),
    [
        ("https://h/d", "a/b.png", "https://h/d/a/b.png"),
        ("zip://d::s3://b/c.zip", "a.png", "zip://d/a.png::s3://b/c.zip"),
        ("memory://", "a.png", "memory://a.png"),
        ("/x/y", "./a.png", "/x/y/a.png"),
        (".", "a.png", "a.png"),
    ],
)
def test_names_of_media(folder, path, name):
    assert joined(folder, path) == name


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("https://h/d/m.jsonl?key=1/2.x", ("https://h/d", "m", ".jsonl")),
        ("zip://d/m.jsonl::s3://b/c.zip", ("zip://d::s3://b/c.zip", "m", ".jsonl")),
        ("memory://m.jsonl", ("memory://", "m", ".jsonl")),
        ("/a/b?.d/c.e.parquet", ("/a/b?.d", "c.e", ".parquet")),
        ("m.jsonl", (".", "m", ".jsonl")),
    ],
)
def test_parts_of_names(path, parts):
    assert (parent(path), stem(path), suffix(path)) == parts


@pytest.mark.medium
def test_draws_from_urls_are_those_from_local_files(memory, tmp_path):
    """Mixed, shuffled anew each epoch, and resumed at any draw; whatever the place of the files."""
    records = [{"id": str(i), "prompt": "?", "answer": str(i), "images": [f"{i}.png"]} for i in range(5)]
    places = (str(tmp_path), memory)
    for place in places:
        put(f"{place}/m.jsonl", lines(*records))
        put_table(f"{place}/t.parquet", table(7), 3)

    def loader(place):
        sources = {"m": open_source(f"{place}/m.jsonl", "m"), "t": open_source(f"{place}/t.parquet", "t")}
        return PromptLoader(sources, {"m": 1.0, "t": 3.0}, seed=3)

    def drawn(loader, begin, end):
        prompts = [loader.order[draw] for draw in range(begin, end)]
        cells = [(media.cell or media.path.rpartition("/")[2]) for prompt in prompts for media in prompt.media]
        return [(p.source, p.id, p.draw, p.epoch, p.row) for p in prompts], cells

    here, there = map(loader, places)
    assert drawn(here, 0, 40) == drawn(there, 0, 40)
    resumed = loader(memory)
    resumed.resume(3, json.loads(json.dumps(here.mixtures)), 17)
    assert drawn(resumed, 17, 40) == drawn(here, 17, 40)


@pytest.mark.slow
def test_prompts_are_prepared_from_urls_as_from_files(server):
    folder, url = server
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 255, (16, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    records = [{"prompt": "<image>?", "answer": "1", "images": [f"{i}.png"]} for i in range(4)]
    (folder / "m.jsonl").write_bytes(lines(*records))
    config = Config()

    config.rollout.prompts_per_step = 4

    def prepared(place):
        processor = tiny.build(["?"], layout=PatchLayout(patch_size=8, window_size=32))
        loader = PromptLoader({"s": open_source(f"{place}/m.jsonl", "s")}, {"s": 1.0}, 0)
        with contextlib.closing(Preparer(processor, loader, config)) as preparer:
            found, skipped = asyncio.run(preparer.draw(6))
            assert not skipped
            return [item.inputs.patches_PX for item in found]

    np.testing.assert_array_equal(prepared(url), prepared(folder))
