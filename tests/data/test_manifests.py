"""JSONL manifests: what they may say, and the file and line of everything wrong with them."""

import base64
import json
import pathlib
import re

import pytest

from fluxjax.base.errors import DataError
from fluxjax.base.types import MediaKind
from fluxjax.data.loader import SkippedPrompt, open_source, read_row
from fluxjax.data.sources import Fields, all_texts, common_words

GOOD = {"id": "a", "prompt": "<image>How many?", "answer": "3", "images": ["pictures/a.png"]}


@pytest.fixture
def write(tmp_path):
    def write(*records):
        path = tmp_path / "train.jsonl"
        path.write_bytes(
            b"\n".join(r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=False).encode() for r in records)
        )
        return path

    return write


def test_a_record_becomes_a_prompt_with_media_beside_the_manifest(write, tmp_path):
    (prompt,) = open_source(write(GOOD), "counting")
    assert (prompt.id, prompt.source, prompt.text, prompt.answer) == ("a", "counting", "<image>How many?", "3")
    assert [(m.kind, m.path) for m in prompt.media] == [(MediaKind.IMAGE, str(tmp_path / "pictures/a.png"))]


@pytest.mark.parametrize("prompt", ["prompt", "problem", "question"])
@pytest.mark.parametrize("answer", ["answer", "solution", "ground_truth"])
def test_usual_names_are_recognised(write, prompt, answer):
    (record,) = open_source(write({prompt: "1 + 1", answer: 2}), "sums")
    assert (record.id, record.text, record.answer, record.media) == ("1", "1 + 1", "2", ())


def test_given_names_win(write):
    path = write({"prompt": "no", "q": "yes", "answer": "no", "a": "yes"})
    (record,) = open_source(path, "s", Fields(prompt="q", answer="a"))
    assert (record.text, record.answer) == ("yes", "yes")
    with pytest.raises(DataError, match=r"train.jsonl:1: no field 'qq'; found 'q', expected 'qq'"):
        open_source(path, "s", Fields(prompt="qq", answer="a"))


def test_a_single_path_is_a_list_of_one_and_text_without_marks_gets_them_in_front(write):
    (record,) = open_source(write({"prompt": "What?", "answer": "x", "image": "a.png", "videos": ["b.mp4"]}), "s")
    assert record.text == "<image><video>What?"
    assert [pathlib.Path(m.path).name for m in record.media] == ["a.png", "b.mp4"]


def test_media_stand_in_the_order_of_the_marks(write):
    record = {"prompt": "<video> or <image> or <image>?", "answer": "x", "images": ["1", "2"], "videos": ["3"]}
    (prompt,) = open_source(write(record), "s")
    assert [pathlib.Path(m.path).name for m in prompt.media] == ["3", "1", "2"]


def test_blank_lines_a_byte_order_mark_and_other_scripts_are_fine(write):
    second = {**GOOD, "id": "二", "prompt": "<image>几个"}
    source = open_source(write(b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", b"  \r", second), "s")
    assert [source[i].id for i in range(len(source))] == ["a", "二"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b'{"id": "b", "prompt": ', r":2: not valid JSON: Expecting value at column 2\d"),
        (b'{"prompt": "\xff"}', r":2: not valid UTF-8"),
        (b"[1]", r":2: expected a JSON object, found list"),
        ({"promt": "x", "answer": "y"}, r":2: no prompt field; found 'promt', expected 'prompt'"),
        ({"prompt": "x", "anwser": "y"}, r":2: no answer field; found 'anwser', expected 'answer'"),
        ({"prompt": "x"}, r":2: no answer field; found 'prompt'; expected 'answer' or 'solution'"),
        ({**GOOD, "id": "b", "images": [], "imgaes": ["x"]}, r":2: unknown field 'imgaes'; did you mean 'images'\?"),
        (
            GOOD | {"image": "b.png"},
            r":2: 'images' and 'image' hold images; name one of them in data\.sources\.\*\.columns\.images",
        ),
        ({"prompt": "x", "answer": "y", "vidoe": "x"}, r":2: unknown field 'vidoe'; did you mean 'videos'\?"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(write, record, message):
    with pytest.raises(DataError, match=r"train\.jsonl" + message):
        open_source(write(GOOD, record), "s")


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ({"prompt": 3, "answer": "y"}, "no prompt", r":2: 'prompt' must be a string, found 3"),
        ({"prompt": "", "answer": "y"}, "an empty prompt", ":2"),
        ({"prompt": "", "answer": "y", "images": []}, "an empty prompt", ":2"),
        ({"prompt": "x", "answer": ["y"]}, "no answer", r":2: 'answer' must be a string or a number, found \['y'\]"),
        ({"prompt": "x", "answer": "y", "images": [3]}, "no image", r":2: 'images' must be a path or a list of paths"),
        ({"prompt": "x", "answer": "y", "video": {"a": 1}}, "no video", r":2: 'video' must be a path"),
        ({**GOOD, "id": True}, "no id", r":2: 'id' must be a string or an integer, found True"),
        ({**GOOD, "id": "b", "prompt": "<image><image>"}, "2 <image> and 0 <video> marks in the text for 1", ":2"),
        (GOOD, "an id that was used before", ":2, first in line 1"),
        ({**GOOD, "id": "b", "images": "data:image/png;base64"}, "a data URI that cannot be read", ":2"),
        ({**GOOD, "id": "b", "images": [5, "x" * 9999]}, "no image", r":2: .* found \[5, 'x{9,20}\.\.\.x+'\]"),
    ],
)
def test_a_bad_record_costs_itself_only_and_is_named(write, record, reason, detail, caplog):
    """As rows of parquet files do."""
    source = open_source(write(GOOD, record, {**GOOD, "id": "c"}), "s")
    assert len(source) == 3 and (source[0].id, source[2].id) == ("a", "c") and len(list(source.texts())) == 4
    skipped = read_row(source, "s", 1)
    assert isinstance(skipped, SkippedPrompt) and skipped.reason.startswith(reason)
    assert re.search(r"train\.jsonl" + detail, skipped.detail) and len(skipped.detail) < 300


def test_a_file_of_bad_records_is_refused_with_the_first(write):
    records = [{"prompt": "x", "answer": answer} for answer in ([], {})]
    with pytest.raises(DataError, match=r"train\.jsonl:1: .* found \[\]: no answer; all records are unusable"):
        open_source(write(*records), "s")


@pytest.mark.parametrize("empty", [None, [], ""])
def test_a_field_that_holds_nothing_does_not_hide_another(write, empty):
    record = {"prompt": "q", "answer": "1", "images": empty, "image": "a.png", "videos": empty, "video": ["b.mp4"]}
    (prompt,) = open_source(write(record), "s")
    assert [pathlib.Path(m.path).name for m in prompt.media] == ["a.png", "b.mp4"]
    (prompt,) = open_source(write(record), "s", Fields(images="image"))
    assert len(prompt.media) == 2


def test_media_that_nobody_named_are_told_of(write, tmp_path, caplog):
    names = ("a.png", "https://x.org/b/C.JPEG", "clip.webm", "IMG_1.HEIC", "https://x.org/a.jpg?size=3", "b.m4v")
    for value in (*names, {"url": "data:image/png;base64,AA=="}, {"type": "image", "path": "a.png"}):
        open_source(write({"prompt": "q", "answer": "1", "level": 3, "photo": value}), "birds")
        assert (
            "media in 'photo' are not used; to use them, name the field in data.sources.birds.columns.images"
            in caplog.text
        )
        caplog.clear()
    for value in (["a.png"], [{"path": "a.png", "bytes": None}], {"path": "a.png", "bytes": None, "width": 3}):
        record = {"prompt": "q", "answer": "1", "photo": value}
        with pytest.raises(DataError, match=r"media in 'photo' are not used: name the field in .*columns"):
            open_source(write(record), "s")
        open_source(write(record | {"image": "b.png"}), "s")
        assert "media in 'photo' are not used" in caplog.text
        caplog.clear()
    (prompt,) = open_source(write({"prompt": "q", "answer": "1", "photo": "a.png"}), "s", Fields(images="photo"))
    assert [media.path for media in prompt.media] == [str(tmp_path / "a.png")]
    open_source(write({"prompt": "q", "answer": "1", "tags": ["a", "e.g."], "url": "https://x.org/", "n": None}), "s")
    assert not caplog.records


def test_a_data_uri_is_the_medium_and_has_a_short_name(write):
    encoded = base64.b64encode(b"pixels" * 100).decode()
    record = {"prompt": "q", "answer": "1", "images": [f"data:image/png;base64,{encoded}", "data:image/bmp,%00%01"]}
    (prompt,) = open_source(write(record), "s")
    assert [media.data for media in prompt.media] == [b"pixels" * 100, b"\x00\x01"]
    assert prompt.media[0].name == "data:image/png;base64,cGl4ZWxz... (822 characters)"


@pytest.mark.parametrize("text", ["How do I use the <video> tag?", "<image> or <picture>?", "<image><image>"])
def test_marks_are_words_where_there_is_no_field_of_media(write, text):
    (prompt,) = open_source(write({"prompt": text, "answer": "x"}), "s")
    assert (prompt.text, prompt.media) == (text, ())


def test_truth_values_are_answers(write):
    source = open_source(write(*({"prompt": "q", "answer": answer} for answer in (True, False, 0.5))), "s")
    assert [source[index].answer for index in range(3)] == ["True", "False", "0.5"]


def test_extra_fields_are_welcome(write):
    assert len(open_source(write({**GOOD, "level": 3, "source": "x", "tags": []}), "s")) == 1


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_an_error(write, content):
    with pytest.raises(DataError, match=r"train\.jsonl: the file has no records"):
        open_source(write(content), "s")


def test_a_hub_id_is_answered_with_how_to_download_it():
    with pytest.raises(DataError) as caught:
        open_source("openai/gsm8k", "s")
    assert "data.sources.s: openai/gsm8k does not exist" in str(caught.value)
    assert "hf download openai/gsm8k --repo-type dataset --local-dir gsm8k" in str(caught.value)
    with pytest.raises(DataError, match=r"mine/train.jsonl does not exist$"):
        open_source("mine/train.jsonl", "s")


def test_paths_that_cannot_be_opened(tmp_path):
    with pytest.raises(DataError, match=r"data\.sources\.s: .*nowhere.jsonl does not exist"):
        open_source(tmp_path / "nowhere.jsonl", "s")
    (tmp_path / "data.csv").write_text("")
    with pytest.raises(DataError, match=r"data.csv is neither .jsonl nor .parquet"):
        open_source(tmp_path / "data.csv", "s")
    with pytest.raises(DataError, match=r"the folder has no .parquet files"):
        open_source(tmp_path, "s")


def test_texts_and_common_words(write):
    records = [{"prompt": f"<image>Which way, {i}?", "answer": a, "images": "x"} for i, a in enumerate(["up", "down"])]
    rare = [{"prompt": f"{chr(97 + i // 10)}{chr(97 + i % 10)} way", "answer": "up"} for i in range(80)]
    sources = [open_source(write(*records), "s"), open_source(write(*rare), "t")]
    assert list(all_texts(sources[:1])) == ["<image>Which way, 0?", "up", "<image>Which way, 1?", "down"]
    assert common_words(sources) == ["Which", "down", "up", "way"]
