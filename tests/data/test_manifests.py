"""JSONL manifests: what they may say, and the file and line of everything wrong with them."""

import json
import pathlib

import pytest

from fluxjax.base.errors import DataError
from fluxjax.base.types import MediaKind
from fluxjax.data.fields import Fields
from fluxjax.data.sources import all_texts, common_words, open_source

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
        ({**GOOD, "id": "b", "images": [], "imgaes": ["x"]}, r":2: 1 <image> .* for 0 images"),
        ({"prompt": "x", "answer": "y", "imgaes": ["x"]}, r":2: unknown field 'imgaes'; did you mean 'images'\?"),
        ({"prompt": "x", "answer": "y", "vidoe": "x"}, r":2: unknown field 'vidoe'; did you mean 'videos'\?"),
        ({"prompt": 3, "answer": "y"}, r":2: 'prompt' must be a string, found 3"),
        ({"prompt": "x", "answer": ["y"]}, r":2: 'answer' must be a string or a number, found \['y'\]"),
        ({"prompt": "x", "answer": None}, r":2: 'answer' must be a string or a number, found None"),
        ({"prompt": "x", "answer": "y", "images": [3]}, r":2: 'images' must be a path or a list of paths"),
        ({**GOOD, "id": True}, r":2: 'id' must be a string or an integer, found True"),
        ({**GOOD, "id": "b", "prompt": "<image><image>"}, r":2: 2 <image> and 0 <video> marks .* for 1 images and 0"),
        (GOOD, r":2: the id 'a' was already used in line 1"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(write, record, message):
    with pytest.raises(DataError, match=r"train\.jsonl" + message):
        open_source(write(GOOD, record), "s")


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
