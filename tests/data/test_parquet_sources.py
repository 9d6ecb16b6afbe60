"""Parquet as the hub has it: embedded images, named by their cells; row groups read when drawn."""

import decimal
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
from fluxjax.data import cells, parquet
from fluxjax.data.fields import Fields
from fluxjax.data.media_columns import SLOTS, read_slots
from fluxjax.data.media_refs import source_of
from fluxjax.data.sources import open_source
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


def test_rows_with_embedded_images(tmp_path):
    pq.write_table(geometry(10), tmp_path / "train.parquet", row_group_size=3)
    source = open_source(tmp_path / "train.parquet", "geometry")
    assert isinstance(source, parquet.ParquetSource) and len(source) == 10
    for index in np.random.default_rng(0).permutation(10):
        prompt = source[int(index)]
        assert (prompt.id, prompt.source) == (f"train:{index}", "geometry")
        assert (prompt.text, prompt.answer) == (f"<image>Find x{index}.", str(index))
        (media,) = prompt.media
        assert media.kind is MediaKind.IMAGE and media.name == f"{tmp_path}/train.parquet#images/{index}/0"
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


def test_only_the_row_group_of_a_row_is_read_and_few_are_kept(tmp_path, monkeypatch):
    pq.write_table(geometry(12), tmp_path / "train.parquet", row_group_size=3)
    source = open_source(tmp_path / "train.parquet", "geometry")
    read = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, i, columns: read.append((i, *columns)) or original(self, i, columns),
    )

    def groups(kind):
        return [group for group, *columns in read if kind in columns]

    assert [source[i].answer for i in (7, 8, 6, 0, 7)] == ["7", "8", "6", "0", "7"]
    assert groups("answer") == [2, 0] and not groups("images"), "no pixels are read"
    assert [len(source_of(source[i].media[0])) > 0 for i in (7, 8, 6, 0, 7)] == [True] * 5
    assert groups("answer") == groups("images") == [2, 0]
    monkeypatch.setattr(parquet, "CACHE_BYTES", 0)
    monkeypatch.setattr(cells, "KEPT_BYTES", 0)
    assert [len(source_of(source[i].media[0])) > 0 for i in (3, 4, 7)] == [True] * 3
    assert groups("answer") == groups("images") == [2, 0, 1, 2]


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("image", pa.array([b"one", b"two"]), [b"one"]),
        ("image", pa.array([{"bytes": b"one", "path": "a"}] * 2, STRUCT), [b"one"]),
        ("images", pa.array([[b"one", b"two"], []]), [b"one", b"two"]),
        ("images", pa.array([["a.png"], None], pa.list_(pa.string())), "a.png"),
        ("images", pa.array([[{"bytes": None, "path": "a.png"}], []], pa.list_(STRUCT)), "a.png"),
    ],
)
def test_media_columns_in_all_their_forms(tmp_path, column, values, expected):
    table = pa.table({column: values, "question": ["q", "r"], "solution": ["1", "2"]})
    pq.write_table(table, tmp_path / "x.parquet")
    prompt = open_source(tmp_path / "x.parquet", "s")[0]
    if isinstance(expected, str):
        assert [(m.path, m.data) for m in prompt.media] == [(str(tmp_path / expected), None)]
    else:
        assert [source_of(m) for m in prompt.media] == expected and not any(m.data for m in prompt.media)
    assert prompt.text == "<image>" * len(prompt.media) + "q"


def fixed(kind):
    return pa.list_(kind, 2)


@pytest.mark.parametrize("kind", [fixed, pa.list_view, pa.large_list_view, pa.large_list])
@pytest.mark.parametrize("item", [STRUCT, pa.binary(), pa.large_binary()])
def test_lists_of_all_kinds_hold_media(tmp_path, kind, item):
    pictures = [png(1), png(2)]
    rows = [[{"bytes": picture, "path": None} if item == STRUCT else picture for picture in pictures]] * 3
    plain = pa.table({"images": pa.array(rows, pa.list_(item)), "problem": ["q"] * 3, "answer": ["a"] * 3})
    table = plain.set_column(0, "images", pa.array(rows, kind(item)))
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    prompt = open_source(tmp_path / "x.parquet", "s")[2]
    assert prompt.text == "<image><image>q" and [shade(media) for media in prompt.media] == [1, 2]


@pytest.mark.parametrize("kind", [fixed, pa.list_view, pa.large_list_view])
@pytest.mark.parametrize("item", [pa.string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_lists_of_all_kinds_hold_paths(tmp_path, kind, item):
    rows = pa.array([["a.png", "b.png"]], kind(pa.string()))
    if item != pa.string():
        try:
            rows = pa.array([["a.png", "b.png"]], kind(item))
        except (pa.ArrowException, NotImplementedError):
            pytest.skip(f"pyarrow cannot make {kind(item)}")
    pq.write_table(pa.table({"images": rows, "problem": ["q"], "answer": ["a"]}), tmp_path / "x.parquet")
    prompt = open_source(tmp_path / "x.parquet", "s")[0]
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
def test_columns_without_any_value(tmp_path, values):
    pq.write_table(pa.table({"images": values, "problem": ["q", "r"], "answer": ["1", "2"]}), tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet", "s")
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
def test_answers_of_all_types(tmp_path, values, expected):
    texts = pa.array(["q", "r"], pa.string_view() if values.type == pa.string_view() else pa.string())
    if pa.types.is_dictionary(values.type):
        texts = texts.dictionary_encode()
    pq.write_table(pa.table({"problem": texts, "answer": values}), tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet", "s")
    assert (source[1].text, source[1].answer) == ("r", expected) and list(source.texts())[-1] == expected


def test_media_beside_those_that_are_used_are_told_of(tmp_path, caplog):
    table = geometry(2).append_column("photo", pa.array([None, b"x"]))
    table = table.append_column("file_name", pa.array(["a.png", "b.png"])).append_column("level", pa.array([1, 2]))
    pq.write_table(table, tmp_path / "x.parquet")
    open_source(tmp_path / "x.parquet", "s")
    assert [record.args[1] for record in caplog.records] == ["photo", "file_name"]
    text = pa.table({"problem": ["<image>"], "answer": ["x"], "file_name": ["a.png"]})
    pq.write_table(text, tmp_path / "x.parquet")
    assert open_source(tmp_path / "x.parquet", "s")[0].text == "<image>"
    assert [record.args[1] for record in caplog.records] == ["photo", "file_name", "file_name"]


def test_a_column_of_nulls_does_not_hide_another(tmp_path):
    table = pa.table({"images": pa.array([None]), "image": ["a.png"], "problem": ["q"], "answer": ["x"]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert len(open_source(tmp_path / "x.parquet", "s")[0].media) == 1


def test_videos_and_given_columns(tmp_path):
    table = pa.table({"clip": [[b"v"]], "q": ["<video>what?"], "n": [7], "uid": ["k"], "prompt": ["unused"]})
    pq.write_table(table, tmp_path / "x.parquet")
    prompt = open_source(tmp_path / "x.parquet", "s", Fields(prompt="q", answer="n", videos="clip"))[0]
    assert (prompt.id, prompt.text, prompt.answer) == ("k", "<video>what?", "7")
    assert [(m.kind, source_of(m)) for m in prompt.media] == [(MediaKind.VIDEO, b"v")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": ["x"], "answer": ["y"]}, "no prompt field; found 'promt', expected 'prompt'"),
        ({"problem": [["x"]], "answer": ["y"]}, "column 'problem' must hold text, found list"),
        ({"problem": [1], "answer": ["y"]}, "column 'problem' must hold text, found int64"),
        ({"problem": ["x"], "answer": [{"a": 1}]}, "column 'answer' must hold text, found struct"),
        ({"problem": ["x"], "answer": ["y"], "images": [[1.0]]}, "column 'images' must hold bytes, paths"),
        ({"problem": ["x"], "answer": ["y"], "imagse": [b""]}, "unknown field 'imagse'; did you mean 'images'"),
        ({"problem": ["x"], "answer": ["y"], "photo": [b"1"]}, "media in 'photo' are not used: name the field in data"),
        (
            {"problem": ["x"], "answer": ["y"], "pages": [[{"bytes": None, "path": "a.png"}]]},
            "media in 'pages' are not",
        ),
        (
            {"problem": ["x"], "answer": ["y"], "image": ["a"], "images": [["b"]]},
            "'images' and 'image' hold images; na",
        ),
        ({"problem": pa.array([None]), "answer": ["y"]}, "column 'problem' must hold text, found null"),
        ({"problem": ["x"], "answer": pa.array([None])}, "column 'answer' must hold text, found null"),
        ({"problem": ["x"] * 2, "answer": ["y"] * 2, "id": [5, 5]}, "row 1 has the id 5, already used by x.parquet#0"),
        ({"problem": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, "the file has no records"),
    ],
)
def test_a_wrong_file_is_refused_when_it_is_opened(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / "x.parquet", "s")


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
        ({"problem": "<image>x", "answer": "y", "images": []}, "1 <image> and 0 <video> marks in the prompt for 0"),
    ],
)
def test_a_bad_row_is_a_record_error_and_the_others_are_usable(tmp_path, row, reason):
    schema = pa.schema([("problem", pa.string()), ("answer", pa.string()), ("images", pa.list_(STRUCT))])
    good = {"problem": "q", "answer": "a", "images": []}
    pq.write_table(pa.Table.from_pylist([row, good], schema), tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet", "s")
    with pytest.raises(RecordError) as caught:
        source[0]
    assert caught.value.id == "x:0" and caught.value.reason.startswith(reason)
    assert source[1].text == "q"


def test_large_row_groups_are_pointed_out(tmp_path, monkeypatch, caplog):
    pq.write_table(geometry(4), tmp_path / "x.parquet")
    monkeypatch.setattr(parquet, "LARGE_ROW_GROUP", 100)
    open_source(tmp_path / "x.parquet", "s")
    assert "row_group_size=100" in caplog.text
