"""Greedy decoding equals transformers' `generate` on tiny random checkpoints, through files and the command line."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from hf_reference import checkpoint, torch
from media_files import in_raster_order, moving_frames, write_video
from PIL import Image
from plain_decode import generate
from tiny import run

from models.decoder import logprobs
from models.generate import main
from models.inputs import PackedTokens
from models.processing import Processor
from rollout.generate_command import arrange
from sharding.walk import Walk

QUESTION, MIXED = "which way does it go?", "a<image>b<video><image>c<video>!"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    for name, size in (("a.png", (20, 30)), ("b.png", (40, 18))):
        Image.fromarray(moving_frames(1, *size, seed=size[0])[0]).save(folder / name)
    for name, size in (("a.mp4", (24, 32)), ("b.mp4", (16, 40))):
        write_video(folder / name, moving_frames(8, *size, seed=size[0]))
    return folder


@pytest.fixture(scope="module")
def vl(tmp_path_factory):
    return checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return checkpoint("qwen2", tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory):
    return checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def media_of(prompt, files):
    images, videos = prompt.count("<image>"), prompt.count("<video>")
    return arrange(
        prompt, [str(files / f"{n}.png") for n in "ab"[:images]], [str(files / f"{n}.mp4") for n in "ab"[:videos]]
    )


def reference_generate(reference, processor, prompt, media):
    """Ids and log-probs of transformers' own greedy generation; patches in the raster order of its processors."""
    loaded = {"image": [], "video": []}
    for kind, path in media:
        loaded[kind].append(in_raster_order(processor.settings, kind, path))
    ids = prompt.token_ids_T
    inputs = {"input_ids": torch.as_tensor(ids[None]).long(), "attention_mask": torch.ones(1, len(ids)).long()}
    if media:
        inputs["mm_token_type_ids"] = torch.as_tensor(((ids == 6) * 1 + (ids == 7) * 2)[None])
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if loaded[kind]:
            inputs[name] = torch.as_tensor(np.concatenate([patches_PX for _, patches_PX in loaded[kind]]))
            inputs[f"{kind}_grid_thw"] = torch.as_tensor([medium.grid for medium, _ in loaded[kind]])
    if loaded["video"] and not processor.layout.timed:
        inputs["second_per_grid_ts"] = torch.as_tensor([medium.seconds_per_grid for medium, _ in loaded["video"]])
    settings = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    out = reference.generate(**inputs, **settings, max_new_tokens=20)
    new = out.sequences[0, len(ids) :].numpy()
    scores = torch.log_softmax(torch.cat(out.logits).float(), -1).numpy()
    return new.tolist(), scores[np.arange(len(new)), new]


def full_forward(model, prompt, token_ids):
    """Log-probs of the generated tokens in one pass over prompt and answer, without a cache."""
    T, extra = len(prompt), len(token_ids)
    generated = np.broadcast_to(prompt.next_position + np.arange(extra, dtype=np.int32), (3, extra))
    inputs = PackedTokens(
        tokens_BT=np.concatenate([prompt.token_ids_T, token_ids]).astype(np.int32)[None],
        segments_BT=np.ones((1, T + extra), np.int32),
        branches_BT=np.zeros((1, T + extra), np.int32),
        positions_3BT=np.concatenate([prompt.positions_3T, generated], axis=1)[:, None],
        predecessor_BT=np.maximum(np.arange(T + extra, dtype=np.int32) - 1, 0)[None],
        feature_index_BT=np.concatenate([prompt.feature_index_T, np.full(extra, -1, np.int32)])[None],
        vision=prompt.vision,
    )
    return np.asarray(run(model, logprobs, inputs, Walk())[0])[0, T:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "asked"), [("text", QUESTION), ("qwen3", QUESTION), ("vl", QUESTION), ("vl", MIXED), ("qwen3_vl", MIXED)]
)
def test_greedy_equals_transformers_and_the_full_forward(request, files, kind, asked):
    pair = request.getfixturevalue(kind)
    processor = Processor.load(pair.folder)
    marked, media = media_of(asked, files)
    prompt = processor.prepare(marked, media)
    ours = generate(pair.model, prompt, max_new_tokens=20)
    ids, scores = reference_generate(pair.reference, processor, prompt, media)
    assert list(ours.token_ids) == ids
    assert not ours.stopped and len(set(ids)) > 3  # a constant answer would prove little
    np.testing.assert_allclose(ours.logprobs, scores, atol=1e-4, rtol=0)
    np.testing.assert_allclose(ours.logprobs, full_forward(pair.model, prompt, ours.token_ids), atol=1e-4, rtol=0)


def test_media_without_marks_stand_in_front_images_first():
    media = [("image", "a.png"), ("image", "b.png"), ("video", "a.mp4")]
    assert arrange("which?", ["a.png", "b.png"], ["a.mp4"]) == ("<image><image><video>which?", media)


@pytest.mark.slow
def test_command_line_stops_at_the_checkpoints_end_id(text, capsys, tmp_path):
    processor = Processor.load(text.folder)
    free = generate(text.model, processor.prepare("ab"), max_new_tokens=8).token_ids
    end = next(token for index, token in enumerate(free) if index > 0 and token not in free[:index])
    for file in text.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    assert main(["--model", str(tmp_path), "--prompt", "ab", "--max-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output_ids"] == list(free[: free.index(end) + 1])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/gone"], "error: /gone: no such folder"),
        (["--image", "/gone.png"], "error: /gone.png: no such file"),
        (["--video", "/gone.mp4"], "error: /gone.mp4: no such file"),
        (["--prompt", "<image>?"], "error: the prompt marks 1 image(s), but 0 were given"),
        (["--prompt", "é"], "cannot be written"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(vl, capsys, arguments, message):
    assert main(["--model", str(vl.folder), "--prompt", "a", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and message in captured.err and not captured.out


def test_text_model_refuses_media(text, files, capsys):
    assert main(["--model", str(text.folder), "--prompt", "a", "--image", str(files / "a.png")]) == 2
    assert "reads text only" in capsys.readouterr().err


def test_help_needs_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-m", "models.generate", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--max-tokens" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "argparse" in imported and not imported & {"jax", "flax", "numpy", "av"}
