"""`python -m models.generate`: the engine's answers, the flags, and one line for what is wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import sys

import numpy as np
import pytest
from plain_decode import generate
from protocol_cases import clip
from rollout_cases import TEXT, VL
from serve_cases import PICTURE, checkpoint, media_model, refused_flags

import models
from models.generate import main
from models.processing import Processor, tiny
from rollout.generate_command import how_to_sample, not_applied

pytestmark = pytest.mark.slow

TEXTS = ["abcdefghijklmnopqrstuvwxyz ?!.,:\n"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] }}:"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}a:"
)


def bounded(config):
    return dataclasses.replace(config, text=dataclasses.replace(config.text, max_position_embeddings=60))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("text"), bounded(TEXT), tiny.build(TEXTS))


@pytest.fixture(scope="module")
def vl(tmp_path_factory):
    folder = checkpoint(tmp_path_factory.mktemp("vl"), *media_model(TEXTS, bounded(VL)))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("media") / "a.png"
    path.write_bytes(PICTURE)
    return str(path)


def altered(folder, tmp_path, **generation):
    """The checkpoint with another generation_config.json."""
    for file in folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], **generation}))
    return tmp_path


def answer(capsys, folder, *flags):
    assert main(["--model", str(folder), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, folder, *flags) -> str:
    return refused_flags(main, ["--model", str(folder), *flags], "", capsys)


@pytest.mark.slow
def test_answers_are_those_of_the_plain_way(vl, picture, capsys):
    got = answer(capsys, vl, "--prompt", "what <image>?", "--image", picture, "--max-tokens", "12")
    assert set(got) == {"prompt_ids", "output_ids", "logprobs", "text"}
    processor = Processor.load(vl)
    prompt = processor.prepare_chat("what <image>?", [("image", picture)])
    want = generate(models.load(vl), prompt, max_new_tokens=12, stop_ids=processor.eos_ids)
    assert got["prompt_ids"] == prompt.token_ids_T.tolist()
    assert got["output_ids"] == list(want.token_ids) and len(set(want.token_ids)) > 2
    np.testing.assert_allclose(got["logprobs"], want.logprobs, rtol=0, atol=1e-5)
    assert got["text"] == processor.decode(want.token_ids)


def test_text_appears_while_it_is_generated(text, capsys, monkeypatch):
    want = answer(capsys, text, "--prompt", "ab", "--max-tokens", "20")["text"]

    class Screen(io.StringIO):
        shown = ()

        def flush(self):
            self.shown = (*self.shown, self.getvalue())

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["--model", str(text), "--prompt", "ab", "--max-tokens", "20"]) == 0
    assert screen.getvalue() == want + "\n"
    assert len({shown for shown in screen.shown if shown and shown != screen.getvalue()}) > 2  # bit by bit


def test_stop_strings_end_the_answer(text, capsys):
    free = answer(capsys, text, "--prompt", "ab", "--max-tokens", "20")
    stop = free["text"][3:5]
    at = free["text"].index(stop)
    got = answer(capsys, text, "--prompt", "ab", "--max-tokens", "20", "--stop", "zzzzzzzz", stop)
    assert got["text"] == free["text"][:at]
    count = len(got["output_ids"])
    assert got["output_ids"] == free["output_ids"][:count] and len(got["logprobs"]) == count < 20


@pytest.mark.medium
def test_the_checkpoint_says_how_to_sample_and_flags_win(text, capsys, tmp_path):
    greedy = answer(capsys, text, "--prompt", "ab", "--max-tokens", "8")
    folder = altered(text, tmp_path, do_sample=True, temperature=0.5, top_k=1)
    cold = answer(capsys, folder, "--prompt", "ab", "--max-tokens", "8")
    assert cold["output_ids"] == greedy["output_ids"]  # by top-k alone
    assert np.all(np.array(cold["logprobs"]) > greedy["logprobs"])  # of a colder distribution
    again = answer(capsys, folder, "--prompt", "ab", "--max-tokens", "8", "--temperature", "0")
    assert again == greedy
    drawn = [
        answer(capsys, folder, "--prompt", "ab", "--max-tokens", "8", "--top-k", "0", "--seed", seed)["output_ids"]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != greedy["output_ids"]


def test_generation_config_fields(text, tmp_path):
    def said(**fields):
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
        return how_to_sample(tmp_path)

    read = said(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    assert (read.temperature, read.top_p, read.top_k, not_applied(tmp_path)) == (0.6, 0.9, 20, "")
    assert said(do_sample=True).temperature == 1.0 and said(do_sample=True).top_k == 0
    greedy = said(temperature=0.6, top_p=0.9, top_k=20)  # without do_sample, as in transformers
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)
    given = how_to_sample(tmp_path, 0.3, None, 7)
    assert (given.temperature, given.top_p, given.top_k) == (0.3, 0.9, 7)
    said(repetition_penalty=1.05, num_beams=1)
    assert "repetition_penalty=1.05" in not_applied(tmp_path)
    for field, value in (("temperature", "hot"), ("top_p", 1.5), ("top_k", -1), ("temperature", True)):
        with pytest.raises(ValueError, match=rf"generation_config.json: {field}"):
            said(do_sample=True, **{field: value})
    with pytest.raises(ValueError, match="--temperature: temperature=1e-07"):
        how_to_sample(tmp_path, 1e-7)
    assert said(do_sample=True, top_k=20.0).top_k == 20
    assert how_to_sample(tmp_path / "none").temperature == 0.0


def test_what_is_not_applied_is_named(text, capsys, tmp_path):
    folder = altered(text, tmp_path, repetition_penalty=1.1)
    assert main(["--model", str(folder), "--prompt", "ab", "--max-tokens", "2"]) == 0
    assert "does not support repetition_penalty=1.1" in capsys.readouterr().err


@pytest.mark.slow
def test_pixel_bounds_and_system_message(vl, picture, capsys):
    ask = ("--prompt", "a", "--image", picture, "--max-tokens", "1")
    plain, small = (answer(capsys, vl, *ask, *more)["prompt_ids"] for more in ((), ("--max-pixels", "64")))
    assert len(plain) - len(small) == 4 - 1  # 16x16 pixels are four features, 8x8 one
    large = answer(capsys, vl, *ask, "--min-pixels", "576", "--max-pixels", "1024")["prompt_ids"]
    assert len(large) - len(plain) == 9 - 4
    told = answer(capsys, vl, *ask, "--system", "be brief")["prompt_ids"]
    assert Processor.load(vl).tokenizer.decode(told).startswith("s:be briefu:")


def test_frame_bounds(vl, tmp_path, capsys):
    path = tmp_path / "a.mp4"
    path.write_bytes(clip(16, 28, 28, 0))  # two seconds
    ask = ("--prompt", "a", "--video", str(path), "--max-tokens", "1")
    pads = {}
    for flags in ((), ("--max-frames", "2"), ("--fps", "4"), ("--fps", "4", "--max-frames", "6")):
        ids = answer(capsys, vl, *ask, *flags)["prompt_ids"]
        pads[flags] = ids.count(Processor.load(vl).tokenizer.token_to_id("<|video_pad|>"))
    assert list(pads.values()) == [2 * 4, 4, 4 * 4, 3 * 4]  # four features for each two frames; the checkpoint says 4


def test_answers_end_where_positions_end(text, capsys):
    message = refused(capsys, text, "--prompt", "ab", "--max-tokens", "59")
    assert "2 prompt tokens and --max-tokens 59 exceed the model's 60 positions" in message
    assert "--max-tokens 58" in message
    assert "the prompt has 60 tokens, the model 60 positions" in refused(capsys, text, "--prompt", "a" * 60)
    # without the flag as many as fit
    assert len(answer(capsys, text, "--prompt", "a" * 57)["output_ids"]) <= 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens: must be a whole number at least 1"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature"),
        (["--prompt", "a", "--temperature", "inf"], "--temperature"),
        (["--prompt", "a", "--top-p", "0"], "--top-p: must be a number above 0 and at most 1"),
        (["--prompt", "a", "--top-k", "2147483648"], "--top-k"),
        (["--prompt", "a", "--top-p", "0.5"], "--top-p does nothing at temperature 0"),
        (["--prompt", "a", "--stop", ""], "--stop"),
        (["--prompt", "a", "--system", "b"], "no chat template"),
        (["--prompt", "a", "--raw", "--system", "b"], "--system needs the chat template"),
        (["--prompt", "a", "--min-pixels", "9", "--max-pixels", "4"], "min_pixels=9 is above max_pixels=4"),
        (["--prompt", "a", "--model", "Qwen/Qwen2.5-0.5B"], "Qwen/Qwen2.5-0.5B"),
        (["--prompt", "a", "--nonsense"], "--nonsense"),
    ],
)
def test_wrong_flags_are_one_line(text, capsys, flags, says):
    assert says in refused(capsys, text, *flags)
