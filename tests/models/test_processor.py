"""Prompts to model inputs: tokens and templates as transformers makes them, features where they belong."""

import dataclasses
import hashlib
import json
import pickle

import numpy as np
import pytest
from make_qwen3_vl_golden import GOLDEN, IMAGES, PROMPTS, VIDEOS
from make_qwen3_vl_golden import LAYOUT as TIMED
from make_qwen3_vl_golden import TEXTS as TIMED_TEXTS
from media_files import in_raster_order, moving_frames, parity, write_video
from PIL import Image

from models.inputs import ModelInput
from models.processing import MediaError, Processor, PromptError, tiny
from models.processing.settings import FrameSettings, PatchLayout, PixelSettings

LAYOUT = PatchLayout(patch_size=4, window_size=16, tokens_per_second=2)
TEXTS = ["Which way does it go? {}<|>.,:;'", "abcdefghijklmnopqrstuvwxyz \n0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
# Like the published one: a system turn, parts in order, an open assistant turn.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def processor():
    return tiny.build(TEXTS, ["left", "right"], layout=LAYOUT, max_pixels=32 * 32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    for index, size in enumerate(((20, 30), (40, 18))):
        Image.fromarray(moving_frames(1, *size, seed=index)[0]).save(folder / f"{index}.png")
    write_video(folder / "a.mp4", moving_frames(8, 24, 32, seed=7))
    return folder


@pytest.fixture
def hf_tokenizer(processor, tmp_path):
    processor.save(tmp_path)
    return parity("transformers").AutoTokenizer.from_pretrained(tmp_path)


def test_tokens_equal_transformers(processor, hf_tokenizer):
    for text in ["Which way? left", "bereft leftover right", "<|im_start|>a<|image_pad|>b<|im_end|>\n", "", " 12 "]:
        ids = processor.encode(text)
        assert ids == hf_tokenizer(text)["input_ids"]
        assert processor.decode(ids, skip_special_tokens=False) == text == hf_tokenizer.decode(ids)
    assert processor.decode(processor.encode("ab<|im_end|>")) == "ab"
    assert len(processor.encode("left")) == 1 and len(processor.encode("leftover")) == 8


def test_unknown_characters_are_an_error(processor):
    with pytest.raises(PromptError, match=r"vocabulary: \['é'\]"):
        processor.encode("café <|image_pad|>")


def test_features_stand_where_their_placeholders_are(processor, files):
    """Every placeholder gets the feature of its own block: compared through the pixels of the patches."""
    media = [("image", str(files / "0.png")), ("video", str(files / "a.mp4")), ("image", str(files / "1.png"))]
    prepared = processor.prepare("a<image>b<video><image>c?", media)
    image_id, video_id = (processor.tokenizer.token_to_id(f"<|{kind}_pad|>") for kind in ("image", "video"))
    raster, grids = [], []
    for kind, path in media:
        medium, patches_PX = in_raster_order(processor.settings, kind, path)
        raster.append(patches_PX.reshape(-1, 4, patches_PX.shape[1]))
        grids.append(medium.grid)
    assert grids[0][0] == 1 and grids[1][0] == 2  # an image is one frame pair, four frames are two
    in_order = np.concatenate(raster)
    slots = np.flatnonzero(prepared.feature_index_T >= 0)
    np.testing.assert_array_equal(np.sort(prepared.feature_index_T[slots]), np.arange(len(in_order)))
    packed = prepared.vision.patches_PX.reshape(len(in_order), 4, -1)
    np.testing.assert_array_equal(packed[prepared.feature_index_T[slots]], in_order)
    expected = [image_id] * len(raster[0]) + [video_id] * len(raster[1]) + [image_id] * len(raster[2])
    assert prepared.token_ids_T[slots].tolist() == expected
    for dtype, array in (
        ("int32", prepared.token_ids_T), ("int32", prepared.positions_3T), ("int32", prepared.feature_index_T),
        ("float32", prepared.vision.patches_PX), ("int32", prepared.vision.positions_P2),
    ):  # fmt: skip
        assert array.dtype == dtype
    text = processor.decode(
        [i for i in prepared.token_ids_T.tolist() if i not in (image_id, video_id)], skip_special_tokens=False
    )
    assert text == "a<|vision_start|><|vision_end|>b" + "<|vision_start|><|vision_end|>" * 2 + "c?"


def test_video_time_reaches_the_positions(processor, files):
    """8 frames at 8 a second, 4 sampled: a pair spans half a second, one tick at 2 ticks a second."""
    prepared = processor.prepare("<video>", [("video", str(files / "a.mp4"))])
    slots = prepared.feature_index_T >= 0
    assert sorted(set(prepared.positions_3T[0, slots].tolist())) == [1, 2]


def test_text_only(processor, files):
    prepared = processor.prepare("Which way?")
    assert prepared.vision is None and prepared.next_position == len(prepared) == 10
    np.testing.assert_array_equal(prepared.positions_3T, np.tile(np.arange(10), (3, 1)))
    text_only = tiny.build(TEXTS)
    same = text_only.prepare("Which way?")
    for field in ("token_ids_T", "positions_3T", "feature_index_T"):
        assert getattr(same, field).shape == getattr(prepared, field).shape
        assert getattr(same, field).dtype == getattr(prepared, field).dtype
    with pytest.raises(PromptError, match="text only"):
        text_only.prepare("<image>", [("image", str(files / "0.png"))])


def test_marks_are_words_to_a_model_that_reads_text_only():
    text = "How do I use the <video> tag, and <image>?"
    text_only = tiny.build([text])
    assert text_only.decode(text_only.tokenise(text)) == text == text_only.decode(text_only.tokenise_chat(text))


@pytest.mark.parametrize(
    ("text", "kinds"),
    [("no mark", ["image"]), ("<image>", []), ("<image>", ["video"]), ("<image><video>", ["video", "image"])],
)
def test_marks_and_media_must_match(processor, files, text, kinds):
    with pytest.raises(PromptError, match="one mark for each"):
        processor.prepare(text, [(kind, str(files / "0.png")) for kind in kinds])


def test_placeholders_spelt_out_in_the_text_are_an_error(processor, files):
    with pytest.raises(PromptError, match="2 media placeholders for 1 media"):
        processor.prepare("<image> <|image_pad|>", [("image", str(files / "0.png"))])
    with pytest.raises(PromptError, match="kind image or video, not sound"):
        processor.prepare("<image>", [("sound", "a.wav")])


def test_chat_equals_transformers(processor, hf_tokenizer, files):
    chat = dataclasses.replace(processor, chat_template=TEMPLATE)
    media = [("image", str(files / "0.png")), ("image", str(files / "1.png"))]
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": " b?"}]
    for text, items, parts in (("a<image><image> b?", media, content), ("Which way?", [], "Which way?")):
        rendered = hf_tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
        )
        prepared = chat.prepare_chat(text, items)
        pad = processor.tokenizer.token_to_id("<|image_pad|>")
        runs = [i for n, i in enumerate(prepared.token_ids_T) if i != pad or prepared.token_ids_T[n - 1] != pad]
        assert runs == hf_tokenizer(rendered)["input_ids"]
    assert processor.prepare_chat("Which way?").token_ids_T.tolist() == processor.encode("Which way?")  # no template


def test_saved_and_loaded_it_is_the_same(processor, files, tmp_path):
    chat = dataclasses.replace(processor, chat_template=TEMPLATE, eos_ids=(0, 2))
    (tmp_path / "generation_config.json").write_text('{"top_k": 1}')  # what stands there is kept
    chat.save(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"top_k": 1, "eos_token_id": [0, 2]}
    loaded = Processor.load(tmp_path)
    for name in ("vision", "layout", "image", "video", "frames", "eos_ids", "chat_template", "tokenizer_config"):
        assert getattr(loaded, name) == getattr(chat, name), name
    media = [("video", str(files / "a.mp4"))]
    _equal(loaded.prepare_chat("a<video>", media), chat.prepare_chat("a<video>", media))
    _equal(pickle.loads(pickle.dumps(chat)).prepare("a<video>", media), chat.prepare("a<video>", media))


GENERATION = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "do_sample": True,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "repetition_penalty": 1.05,
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.001,
    "transformers_version": "4.37.0",
}


@pytest.mark.parametrize("ends", [[2, 0], 2, None], ids=["list", "one", "none"])
def test_an_export_keeps_every_field_of_generation_config(processor, tmp_path, ends):
    given = {**GENERATION, "eos_token_id": ends}
    processor.save(tmp_path / "first")
    (tmp_path / "first/generation_config.json").write_text(json.dumps(given))
    loaded = Processor.load(tmp_path / "first")
    loaded.save(tmp_path / "second")
    ids = [2, 0] if ends == [2, 0] else 2 if ends else [0]  # none: the tokenizer's end token is added
    assert json.loads((tmp_path / "second/generation_config.json").read_text()) == {**given, "eos_token_id": ids}
    assert Processor.load(tmp_path / "second").eos_ids == loaded.eos_ids
    assert pickle.loads(pickle.dumps(loaded)).generation_config == loaded.generation_config


def _equal(first: ModelInput, second: ModelInput) -> None:
    for name in ("token_ids_T", "positions_3T", "feature_index_T", "patches_PX"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_transformers_reads_the_saved_settings(processor, tmp_path, files):
    module = parity("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor.save(tmp_path)
    reference = module.Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    with Image.open(files / "0.png") as image:
        expected = reference(images=[image], return_tensors="np")
    medium, patches_PX = in_raster_order(processor.settings, "image", str(files / "0.png"))
    np.testing.assert_array_equal(patches_PX, expected["pixel_values"])
    assert list(medium.grid) == expected["image_grid_thw"][0].tolist()


def test_published_checkpoint_files(processor, tmp_path, files):
    """The layout of Qwen2.5-VL's own repository: one preprocessor file for images and videos, ids in several files."""
    processor.tokenizer.save(str(tmp_path / "tokenizer.json"))
    preprocessor = {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    loaded = Processor.load(tmp_path)
    assert loaded.eos_ids == (2,) and loaded.chat_template == TEMPLATE
    assert loaded.image == loaded.video == PixelSettings(min_pixels=3136, max_pixels=12845056)
    assert loaded.frames == FrameSettings(num_frames=0, fps=2, min_frames=4, max_frames=768)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (tmp_path / "chat_template.jinja").write_text("other")
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"num_frames": 6, "max_pixels": 5000}))
    loaded = Processor.load(tmp_path)
    assert loaded.eos_ids == (2, 0) and loaded.chat_template == "other"
    assert loaded.frames.num_frames == 6 and loaded.video.max_pixels == 5000 and loaded.image.max_pixels == 12845056


def test_what_is_wrong_with_a_folder_is_named(processor, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: no such file"):
        Processor.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Processor.load(tmp_path)
    processor.save(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"preprocessor_config\.json is not valid JSON"):
        Processor.load(tmp_path)


def test_configured_bounds(processor, files):
    path = str(files / "a.mp4")
    small = processor.configured(max_pixels=16 * 16, num_frames=2)
    assert small.image.max_pixels == small.video.max_pixels == 256 and small.frames.num_frames == 2
    assert small.settings.load("video", path)[0].grid == (1, 2, 4)
    assert processor.configured() == processor
    assert processor.configured(min_pixels=10**6).image.max_pixels == 10**6
    with pytest.raises(ValueError, match="is above max_pixels=10"):
        processor.configured(min_pixels=20, max_pixels=10)
    with pytest.raises(MediaError, match="has 8 frames, but 64 were asked for"):
        processor.configured(num_frames=64).settings.load("video", path)


def test_ids_do_not_depend_on_the_order_of_texts():
    first, second = tiny.build_tokenizer(["ba", "c"], ["up", "down"]), tiny.build_tokenizer(["c", "ab"], ["down", "up"])
    assert first.get_vocab() == second.get_vocab()


@pytest.mark.parametrize(
    "frames", [FrameSettings(num_frames=0, fps=0), FrameSettings(fps=3), FrameSettings(num_frames=6, fps=0)]
)
def test_the_choice_of_frames_is_saved(processor, tmp_path, frames):
    dataclasses.replace(processor, frames=frames).save(tmp_path)
    assert Processor.load(tmp_path).frames == frames


def test_settings_that_cannot_be_honoured_are_refused(processor, tmp_path):
    processor.save(tmp_path)
    file = tmp_path / "video_preprocessor_config.json"
    for change in ({"resample": 0}, {"size": {"height": 8, "width": 8}}):
        file.write_text(json.dumps(change))
        with pytest.raises(ValueError, match=r"resample 3|size must bound pixels"):
            Processor.load(tmp_path)
    file.write_text(json.dumps({"resample": None}))
    Processor.load(tmp_path)


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_prompts_equal_the_published_class_of_qwen3_vl(tmp_path, number):
    """Ids with the times of frame pairs, grids and pixels, of settings as published checkpoints have them."""
    text, media, settings = PROMPTS[number]
    expected = json.loads(GOLDEN.read_text())[number]
    tiny.build(TIMED_TEXTS, layout=TIMED).save(tmp_path)
    names = {"processor_class": "Qwen3VLProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(IMAGES | names))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS | settings))
    processor, given = Processor.load(tmp_path), []
    for seed, (count, *size, fps) in enumerate(media):
        frames = moving_frames(count, *size, seed=seed)
        if count == 1:
            Image.fromarray(frames[0]).save(path := tmp_path / f"{seed}.png")
        else:
            path = write_video(tmp_path / f"{seed}.avi", frames, fps=fps, codec="png", pixel_format="rgb24")  # exact
        given.append(("image" if count == 1 else "video", str(path)))
    ids = processor.tokenise(text, given)
    prepared, outline = processor.prepare_ids(ids, given), processor.outline(ids, given)
    assert prepared.token_ids_T.tolist() == expected["ids"]
    assert len(outline) == len(prepared) and outline.num_patches == prepared.vision.num_patches
    for kind in ("image", "video"):
        found = [in_raster_order(processor.settings, *medium) for medium in given if medium[0] == kind]
        assert [list(medium.grid) for medium, _ in found] == expected.get(kind, {}).get("grids", [])
        if found:
            pixels = np.concatenate([patches_PX for _, patches_PX in found])
            assert hashlib.sha256(pixels.tobytes()).hexdigest() == expected[kind]["sha256"]
