"""A folder of parquet files: the split to train on, the held-out one, and what is refused because it is not clear."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fluxjax.base.errors import DataError
from fluxjax.config import Config, DataConfig, SourceConfig
from fluxjax.data.sources import open_held_out, open_source, open_sources, open_warm_start
from fluxjax.data.splits import split_of


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
    with pytest.raises(DataError, match=r"SPLIT-\*\.parquet: no file has such a name"):
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
