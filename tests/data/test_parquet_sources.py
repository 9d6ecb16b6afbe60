"""Parquet as the hub has it: embedded images, named by their cells; row groups read when drawn."""

import decimal
import functools
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from turns import third_of

from fluxjax.base.errors import DataError, RecordError
from fluxjax.base.types import MediaKind
from fluxjax.config import Config, DataConfig, SourceConfig
from fluxjax.data import cells, parquet, tickets
from fluxjax.data.cells import SLOTS, read_slots
from fluxjax.data.loader import open_held_out, open_source, open_sources, open_warm_start
from fluxjax.data.parquet import split_of
from fluxjax.data.sources import Fields
from fluxjax.data.tickets import source_of
from models.processing import MediaError

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(value):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def shade(media):
    """The value that a picture of `png` was made with."""
    data = source_of(media)
    assert isinstance(data, bytes)
    return int(np.asarray(Image.open(io.BytesIO(data)))[0, 0, 0])


def geometry(count, start=0):
    """A table with the columns of Geometry3K."""
    return pa.table(
        {
            "images": pa.array([[{"bytes": png(start + i), "path": None}] for i in range(count)], pa.list_(STRUCT)),
            "problem": [f"<image>Find x{start + i}." for i in range(count)],
            "answer": [str(start + i) for i in range(count)],
        }
    )


@pytest.fixture
def opened(tmp_path):
    """Writes columns, or a table, and opens them as a source."""

    def opened(columns, fields=None, **options):
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(table, tmp_path / "x.parquet", **options)
        return open_source(tmp_path / "x.parquet", "s", fields or Fields())

    return opened


def test_rows_with_embedded_images(tmp_path, opened):
    source = opened(geometry(10), row_group_size=3)
    assert isinstance(source, parquet.ParquetSource) and len(source) == 10
    for index in np.random.default_rng(0).permutation(10):
        prompt = source[int(index)]
        assert (prompt.id, prompt.source) == (f"x:{index}", "s")
        assert (prompt.text, prompt.answer) == (f"<image>Find x{index}.", str(index))
        (media,) = prompt.media
        assert media.kind is MediaKind.IMAGE and media.name == f"{tmp_path}/x.parquet#images/{index}/0"
        assert media.data is None and shade(media) == index
    assert list(source.texts())[:2] == ["<image>Find x0.", "0"]
    with pytest.raises(IndexError):
        source[10]


def test_shards_follow_each_other(tmp_path):
    pq.write_table(geometry(4), tmp_path / "train-00000-of-00002.parquet", row_group_size=3)
    pq.write_table(geometry(5, start=4), tmp_path / "train-00001-of-00002.parquet")
    source = open_source(tmp_path, "geometry")
    assert [source[i].answer for i in range(9)] == [str(i) for i in range(9)]
    assert source[4].id == "train-00001-of-00002:0"
    assert [shade(source[i].media[0]) for i in range(9)] == [*range(9)]


def test_only_the_row_group_of_a_row_is_read_and_few_are_kept(opened, monkeypatch):
    source, read = opened(geometry(12), row_group_size=3), []
    original = pq.ParquetFile.read_row_group

    def noted(self, i, columns):
        read.append((i, *columns))
        return original(self, i, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)

    def groups(kind):
        return [group for group, *columns in read if kind in columns]

    assert [source[i].answer for i in (7, 8, 6, 0, 7)] == ["7", "8", "6", "0", "7"]
    assert groups("answer") == [2, 0] and not groups("images"), "no pixels are read"
    assert [len(source_of(source[i].media[0])) > 0 for i in (7, 8, 6, 0, 7)] == [True] * 5
    assert groups("answer") == groups("images") == [2, 0]
    monkeypatch.setattr(parquet, "CACHE_BYTES", 0)
    monkeypatch.setattr(cells, "KEPT_BYTES", 0)
    monkeypatch.setattr(tickets, "_cells", functools.cache(cells.Cells))
    source = opened(geometry(12), row_group_size=3)
    read.clear()
    assert [len(source_of(source[i].media[0])) > 0 for i in (3, 4, 7, 3)] == [True] * 4
    assert groups("answer") == groups("images") == [1, 2, 1]


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("image", pa.array([b"one", b"two"]), [b"one"]),
        ("image", pa.array([b"one", b"two"]).dictionary_encode(), [b"one"]),
        ("image", pa.array([{"bytes": b"one", "path": "a"}] * 2, STRUCT), [b"one"]),
        ("images", pa.array([[b"one", b"two"], []]), [b"one", b"two"]),
        ("images", pa.array([["a.png"], None], pa.list_(pa.string())), "a.png"),
        ("images", pa.array([[{"bytes": None, "path": "a.png"}], []], pa.list_(STRUCT)), "a.png"),
    ],
)
def test_media_columns_in_all_their_forms(tmp_path, opened, column, values, expected):
    prompt = opened({column: values, "question": ["q", "r"], "solution": ["1", "2"]})[0]
    if isinstance(expected, str):
        assert [(m.path, m.data) for m in prompt.media] == [(str(tmp_path / expected), None)]
    else:
        assert [source_of(m) for m in prompt.media] == expected and not any(m.data for m in prompt.media)
    assert prompt.text == "<image>" * len(prompt.media) + "q"


def fixed(kind):
    return pa.list_(kind, 2)


@pytest.mark.parametrize("kind", [fixed, pa.list_view, pa.large_list_view, pa.large_list])
@pytest.mark.parametrize("item", [STRUCT, pa.binary(), pa.large_binary()])
def test_lists_of_all_kinds_hold_media(opened, kind, item):
    pictures = [png(1), png(2)]
    rows = [[{"bytes": picture, "path": None} if item == STRUCT else picture for picture in pictures]] * 3
    columns = {"images": pa.array(rows, kind(item)), "problem": ["q"] * 3, "answer": ["a"] * 3}
    prompt = opened(columns, row_group_size=2)[2]
    assert prompt.text == "<image><image>q" and [shade(media) for media in prompt.media] == [1, 2]


@pytest.mark.parametrize("kind", [fixed, pa.list_view, pa.large_list_view])
@pytest.mark.parametrize("item", [pa.string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_lists_of_all_kinds_hold_paths(tmp_path, opened, kind, item):
    rows = pa.array([["a.png", "b.png"]], kind(pa.string()))
    if item != pa.string():
        try:
            rows = pa.array([["a.png", "b.png"]], kind(item))
        except (pa.ArrowException, NotImplementedError):
            pytest.skip(f"pyarrow cannot make {kind(item)}")
    prompt = opened({"images": rows, "problem": ["q"], "answer": ["a"]})[0]
    assert [media.path for media in prompt.media] == [str(tmp_path / name) for name in ("a.png", "b.png")]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([None, None]),
        pa.array([[], None], pa.list_(pa.null())),
        pa.array([None, []], pa.list_(STRUCT)),
        pa.array([None, None], pa.dictionary(pa.int32(), pa.string())),
        pa.array([None, None], pa.binary_view()),
    ],
)
def test_columns_without_any_value(opened, values):
    source = opened({"images": values, "problem": ["q", "r"], "answer": ["1", "2"]})
    assert [source[index].media for index in range(2)] == [(), ()]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array(["A", "B"]).dictionary_encode(), "B"),
        (pa.array(["A", "B"], pa.string_view()), "B"),
        (pa.array([True, False]), "False"),
        (pa.array([decimal.Decimal("3.50"), decimal.Decimal("0.00")]), "0.00"),
        (pa.array([decimal.Decimal("0E-9")] * 2, pa.decimal256(40, 9)), "0.000000000"),
        (pa.array([1.5, 2.5], pa.float32()), "2.5"),
        (pa.array([1, 2], pa.uint8()), "2"),
    ],
)
def test_answers_of_all_types(opened, values, expected):
    texts = pa.array(["q", "r"], pa.string_view() if values.type == pa.string_view() else pa.string())
    if pa.types.is_dictionary(values.type):
        texts = texts.dictionary_encode()
    source = opened({"problem": texts, "answer": values})
    assert (source[1].text, source[1].answer) == ("r", expected) and list(source.texts())[-1] == expected


def test_media_beside_those_that_are_used_are_told_of(opened, caplog):
    table = geometry(2).append_column("photo", pa.array([None, b"x"]))
    opened(table.append_column("file_name", pa.array(["a.png", "b.png"])).append_column("level", pa.array([1, 2])))
    assert [record.args[1] for record in caplog.records] == ["photo", "file_name"]
    assert opened({"problem": ["<image>"], "answer": ["x"], "file_name": ["a.png"]})[0].text == "<image>"
    assert [record.args[1] for record in caplog.records] == ["photo", "file_name", "file_name"]


def test_a_column_of_nulls_does_not_hide_another(opened):
    columns = {"images": pa.array([None]), "image": ["a.png"], "problem": ["q"], "answer": ["x"]}
    assert len(opened(columns)[0].media) == 1


def test_videos_and_given_columns(opened):
    columns = {"clip": [[b"v"]], "q": ["<video>what?"], "n": [7], "uid": ["k"], "prompt": ["unused"]}
    prompt = opened(columns, Fields(prompt="q", answer="n", videos="clip"))[0]
    assert (prompt.id, prompt.text, prompt.answer) == ("k", "<video>what?", "7")
    assert [(m.kind, source_of(m)) for m in prompt.media] == [(MediaKind.VIDEO, b"v")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": ["x"], "answer": ["y"]}, "no prompt field; found 'promt', expected 'prompt'"),
        ({"problem": [["x"]], "answer": ["y"]}, "column 'problem' must hold text, found list"),
        ({"problem": ["x"], "answer": [{"a": 1}]}, "column 'answer' must hold text, found struct"),
        ({"problem": ["x"], "answer": ["y"], "images": [[1.0]]}, "column 'images' must hold bytes, paths"),
        ({"problem": ["x"], "answer": ["y"], "imagse": [b""]}, "unknown field 'imagse'; did you mean 'images'"),
        ({"problem": ["x"], "answer": ["y"], "photo": [b"1"]}, "media in 'photo' are not used: name the field in data"),
        ({"problem": ["x"], "answer": ["y"], "a": [{"bytes": b"1", "path": "a", "width": 3}]}, "media in 'a' are not"),
        ({"problem": ["x"], "answer": ["y"], "a": [[{"bytes": None, "path": "a.png"}]]}, "media in 'a' are not used"),
        ({"problem": ["x"], "answer": ["y"], "image": ["a"], "images": [["b"]]}, "'images' and 'image' hold images"),
        ({"problem": pa.array([None]), "answer": ["y"]}, "column 'problem' must hold text, found null"),
        ({"problem": ["x"], "answer": pa.array([None])}, "column 'answer' must hold text, found null"),
        ({"problem": ["x"] * 2, "answer": ["y"] * 2, "id": [5, 5]}, "row 1 has the id 5, already used by x.parquet#0"),
        ({"problem": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, "the file has no records"),
    ],
)
def test_a_wrong_file_is_refused_when_it_is_opened(opened, columns, message):
    with pytest.raises(DataError, match=message):
        opened(columns)


def test_a_file_that_is_no_parquet_and_shards_that_differ(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"a.parquet: not a readable parquet file"):
        open_source(tmp_path / "a.parquet", "s")
    pq.write_table(geometry(1), tmp_path / "a.parquet")
    pq.write_table(geometry(1).drop_columns(["images"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet: no column 'images', which a.parquet has"):
        open_source(tmp_path, "s")


def damage(path, column):
    """Writes zeros over what is stored of a column of the first row group."""
    stored = pq.ParquetFile(path).metadata.row_group(0)
    leaf = next(leaf for i in range(stored.num_columns) if (leaf := stored.column(i)).path_in_schema.endswith(column))
    start = leaf.dictionary_page_offset or leaf.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + leaf.total_compressed_size] = bytes(leaf.total_compressed_size)
    path.write_bytes(content)


def test_damaged_texts_are_a_clear_error_and_damaged_pictures_cost_their_prompts_only(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(geometry(50), path, row_group_size=10, compression="zstd")
    damage(path, "bytes")
    source = open_source(path, "s")
    assert source[0].answer == "0", "no byte of a picture is read to know that there is one"
    with pytest.raises(MediaError, match=r"x.parquet#images/0/0: cannot be read: "):
        source_of(source[0].media[0])
    assert source_of(source[10].media[0]) == png(10)
    damage(path, "problem")
    with pytest.raises(DataError, match=r"x.parquet: row group 0 cannot be read"):
        open_source(path, "s")[0]


ITEM = st.none() | st.fixed_dictionaries(
    {"bytes": st.none() | st.binary(max_size=3), "path": st.sampled_from([None, "", "a"])}
)
PLAIN = st.none() | st.binary(max_size=3)


@settings(max_examples=third_of(60), deadline=None)
@given(
    st.one_of(
        *(
            st.tuples(st.just(kind), st.lists(item, min_size=1, max_size=8), st.booleans(), st.booleans())
            for kind, item in [
                (STRUCT, ITEM),
                (pa.list_(STRUCT), st.none() | st.lists(ITEM, max_size=3)),
                (pa.large_list(STRUCT), st.none() | st.lists(ITEM, max_size=3)),
                (pa.binary(), PLAIN),
                (pa.list_(pa.large_binary()), st.none() | st.lists(PLAIN, max_size=3)),
            ]
        )
    )
)
def test_which_items_a_row_has_is_known_without_their_bytes(case):
    kind, rows, statistics, all_there = case
    if all_there:
        rows = [_filled(row) for row in rows]
    file = io.BytesIO()
    pq.write_table(pa.table({"m": pa.array(rows, kind)}), file, write_statistics=statistics)

    def slot(item):
        data, path = (item["bytes"], item["path"]) if isinstance(item, dict) else (item, None)
        return "" if data is not None else path or None

    lists = [row if isinstance(row, list) else [] if row is None else [row] for row in rows]
    found = read_slots(pq.ParquetFile(file), 0, "m")
    assert found.type == SLOTS and found.to_pylist() == [[slot(item) for item in items] for items in lists]


def _filled(row):
    """The row with bytes wherever it has an item."""
    if isinstance(row, list):
        return [_filled(item) for item in row]
    return row | {"bytes": b"x"} if isinstance(row, dict) else row if row is None else b"x"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": None, "answer": "y", "images": []}, "no prompt"),
        ({"problem": "x", "answer": None, "images": []}, "no answer"),
        ({"problem": "x", "answer": "y", "images": [{"bytes": None, "path": None}]}, "an empty image"),
        ({"problem": "<image>x", "answer": "y", "images": []}, "1 <image> and 0 <video> marks in the text for 0"),
    ],
)
def test_a_bad_row_is_a_record_error_and_the_others_are_usable(opened, row, reason):
    schema = pa.schema([("problem", pa.string()), ("answer", pa.string()), ("images", pa.list_(STRUCT))])
    source = opened(pa.Table.from_pylist([row, {"problem": "q", "answer": "a", "images": []}], schema))
    with pytest.raises(RecordError) as caught:
        source[0]
    assert caught.value.id == "x:0" and caught.value.reason.startswith(reason)
    assert source[1].text == "q"


def test_large_row_groups_are_pointed_out(opened, monkeypatch, caplog):
    monkeypatch.setattr(parquet, "LARGE_ROW_GROUP", 100)
    opened(geometry(4))
    assert "row_group_size=100" in caplog.text


# --- a folder of parquet files: the split to train on, the held-out one, and what is refused because it is not clear


@pytest.fixture
def write(tmp_path):
    """Writes files of one record each, whose answer is the name of the file."""

    def write(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"problem": ["q"], "answer": [name]}), tmp_path / name)
        return tmp_path

    return write


def answers(source):
    return [source[index].answer for index in range(len(source))]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00002-a09b74b3ef9c3b56.parquet", "train"),
        ("train/0000.parquet", "train"),
        ("training_1.parquet", "train"),
        ("data/validation-00000-of-00001.parquet", "validation"),
        ("my.valid.parquet", "validation"),
        ("dev/part-3.parquet", "validation"),
        ("val2017.parquet", "validation"),
        ("main/TEST-00000-of-00001.parquet", "test"),
        ("eval/x.parquet", "test"),
        ("test/train.parquet", "train"),
        ("trained.parquet", ""),
        ("retrain/contest.parquet", ""),
        ("evaluations/devices.parquet", ""),
        ("part-0.parquet", ""),
    ],
)
def test_the_split_that_a_name_says(name, split):
    assert split_of(name) == split


TRAIN, TEST, DEV = "train-00000-of-00001.parquet", "test-00000-of-00001.parquet", "validation-00000-of-00001.parquet"
PARTS = ["part-0.parquet", "part-1.parquet"]


def test_training_and_held_out_records_are_of_the_splits_that_files_name(write, caplog):
    folder = write(f"data/{TRAIN}", f"data/{TEST}", ".cache/huggingface/train-1.parquet")
    for path in (folder, folder / "data"):
        source = SourceConfig(path=str(path), eval_path=str(path))
        config = Config(data=DataConfig(sources={"s": source}))
        for opened in (open_sources, open_warm_start):
            assert answers(opened(config)["s"]) == [f"data/{TRAIN}"]
        assert answers(open_held_out(config)["s"]) == [f"data/{TEST}"]
        assert f"{path}: of the splits test, train, train is read (1 files)" in caplog.text
        assert f"{path}: of the splits test, train, test is read (1 files)" in caplog.text


@pytest.mark.parametrize(
    ("names", "training", "held_out"),
    [
        (["train/0.parquet", "train/1.parquet", "test/0.parquet"], ["train/0.parquet", "train/1.parquet"], None),
        (["default/train/0.parquet", "default/validation/0.parquet"], ["default/train/0.parquet"], None),
        (PARTS, PARTS, PARTS),
        ([TEST], [TEST], [TEST]),
        (["train.parquet", "extra.parquet", "test.parquet"], ["train.parquet"], ["test.parquet"]),
        (["train.parquet", "old/train.parquet"], ["train.parquet"], ["train.parquet"]),
        (["main/train.parquet", "train/main/x.parquet"], ["main/train.parquet", "train/main/x.parquet"], None),
    ],
)
def test_layouts_of_folders(write, names, training, held_out):
    folder = write(*names)
    assert answers(open_source(folder, "s")) == training
    if held_out is not None:
        assert answers(open_source(folder, "s", held_out=True)) == held_out


@pytest.mark.parametrize(
    ("names", "held_out", "message"),
    [
        ([TRAIN, TEST, DEV], True, r"splits test, train, validation; name those that are meant, as in .*/test\*\.p"),
        ([TEST, DEV], False, "of the splits test, validation; name those"),
        ([TEST, "a.parquet"], False, r"of the splits \(none\), test; name those"),
        ([TRAIN, "a.parquet"], True, r"of the splits \(none\), train; name those"),
        ([f"main/{TRAIN}", f"socratic/{TRAIN}"], False, "has the subsets main, socratic; give one, as in .*/socratic$"),
        ([f"de/data/{TRAIN}", f"data/{TRAIN}"], False, r"has the subsets \., de; "),
    ],
)
def test_what_is_not_clear_is_refused(write, names, held_out, message):
    with pytest.raises(DataError, match=message):
        open_source(write(*names), "s", held_out=held_out)


@pytest.mark.parametrize(
    ("names", "held_out", "read"),
    [
        ([TRAIN, TEST, DEV], True, [TEST]),
        ([f"data/{name}" for name in (TRAIN, TEST, DEV)], True, [f"data/{TEST}"]),
        (["train/0.parquet", "validation/0.parquet", "test/0.parquet", "test/1.parquet"], True, ["test/0", "test/1"]),
        (["x/dev/0.parquet", "x/test/0.parquet"], False, ["x/dev/0"]),
        ([TEST, "part-0.parquet", "part-1.parquet"], False, PARTS),
        ([TEST, "a.parquet", "b.parquet"], False, ["a"]),
        ([TRAIN, "a.parquet"], True, ["a"]),
        (["a/train.parquet", "a/test-1.parquet", "b/test-2.parquet", "b/dev.parquet"], True, ["a/test-1"]),
        ([f"main/{TRAIN}", f"socratic/{TRAIN}"], False, [f"socratic/{TRAIN}"]),
        ([f"de/data/{TRAIN}", f"data/{TRAIN}"], False, [f"de/data/{TRAIN}"]),
        ([f"data/{TRAIN}", f"de/data/{TRAIN}", f"de/data/{TEST}"], False, [f"de/data/{TRAIN}"]),
        (["a[1]/dev*.parquet", "a[1]/test.parquet"], False, ["a[1]/dev*"]),
    ],
)
def test_the_advice_of_each_refusal_works(write, names, held_out, read):
    """It is a path that stands for something there, as it is printed."""
    with pytest.raises(DataError) as error:
        open_source(write(*names), "s", held_out=held_out)
    advice = str(error.value).rpartition("as in ")[2]
    assert answers(open_source(advice, "s", held_out=held_out)) == [
        name.removesuffix(".parquet") + ".parquet" for name in read
    ]


def test_a_pattern_reads_what_it_says_and_warns_of_splits(write, caplog):
    folder = write(*(f"gsm/main/{name}" for name in (TRAIN, TEST, DEV)))
    for split, name in (("test", TEST), ("validation", DEV)):
        assert answers(open_source(folder / f"gsm/main/{split}-*.parquet", "s", held_out=True)) == [f"gsm/main/{name}"]
    assert "splits" not in caplog.text
    assert len(answers(open_source(folder / "gsm/main/t*.parquet", "s"))) == 2
    assert "t*.parquet: all of the splits test, train are read (2 files)" in caplog.text
    with pytest.raises(DataError, match=r"SPLIT-\*\.parquet: no file matches this pattern"):
        open_source(folder / "gsm/main/SPLIT-*.parquet", "s")


def test_a_folder_and_a_pattern_may_be_a_url(write):
    fsspec = pytest.importorskip("fsspec")
    folder = write(TRAIN, TEST)
    system = fsspec.filesystem("memory")
    for name in (TRAIN, TEST):
        system.pipe(f"/splits/data/{name}", (folder / name).read_bytes())
    for path in ("memory://splits", "memory://splits/data", "memory://splits/data/train-*.parquet"):
        assert answers(open_source(path, "s")) == [TRAIN]
    assert answers(open_source("memory://splits/data", "s", held_out=True)) == [TEST]


def test_folders_with_letters_that_patterns_know(tmp_path):
    folder = tmp_path / "a[1]*"
    folder.mkdir()
    pq.write_table(pa.table({"problem": ["q"], "answer": ["x"]}), folder / "train.parquet")
    assert answers(open_source(folder, "s")) == ["x"]


@pytest.mark.parametrize("written", ["{}", "{}/", "./{}", "{}/../{}"])
def test_folders_above_say_no_split(write, monkeypatch, written):
    write(f"test/{TRAIN}", f"test/{TEST}")
    monkeypatch.chdir(write())
    assert answers(open_source(written.format("test", "test"), "s")) == [f"test/{TRAIN}"]
