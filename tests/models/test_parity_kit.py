"""`python -m models.parity` finds nothing in our checkpoints, and names the first part that differs where one does."""

import sys

import numpy as np
import pytest
from hf_reference import BUILD, checkpoint
from media_files import moving_frames, write_video
from PIL import Image
from test_processor import TEMPLATE

import models
from models import parity

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each architecture, with a chat template, and a picture and a video."""
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in BUILD:
        checkpoint(kind, root / kind)
        (root / kind / "chat_template.jinja").write_text(TEMPLATE)
    Image.fromarray(moving_frames(1, 20, 30)[0]).save(root / "a.png")
    write_video(root / "a.mp4", moving_frames(40, 24, 32))
    return root


def outcome(capsys, folder, *more):
    status = parity.main(["--model", str(folder), *map(str, more)])
    out, err = capsys.readouterr()
    return status, [line for line in out.splitlines() if line], err


@pytest.mark.parametrize("kind", BUILD)
def test_nothing_differs(folders, kind, capsys):
    status, lines, _ = outcome(capsys, folders / kind)
    assert status == 0, lines[-1]
    parts = [line[:32].strip() for line in lines]
    assert {
        "text: token ids",
        "text: positions (time)",
        "text: embeddings",
        "text: layer 2",
        "text: final norm",
        "text: log-probs",
    } <= {*parts}
    media = {"media: patches of images", "media: positions (width)", "media: features of the tower", "media: logits"}
    reads_media = kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
    assert media <= {*parts} if reads_media else not any("media" in part for part in parts)


def test_text_behind_a_video_is_a_known_difference(folders, capsys):
    files = "--image", folders / "a.png", "--video", folders / "a.mp4", folders / "a.mp4"
    status, lines, _ = outcome(capsys, folders / "qwen2_5_vl", *files)
    assert status == 0, lines[-1]
    assert any(line.startswith("media: positions (time)") and "known: " in line for line in lines)
    assert lines[-1].startswith("media: log-probs")


def change_layer_1(model):
    model.layers.attention.k[...] = model.layers.attention.k[...].at[1].multiply(1.01)


def change_tower(model):
    model.visual.blocks.o[...] = model.visual.blocks.o[...].at[0].multiply(1.01)


def change_head(model):
    model.head.table[...] = model.head.table[...].at[7].add(np.nan)


@pytest.mark.parametrize(
    ("change", "part"),
    [(change_layer_1, "text: layer 1"), (change_tower, "media: features of the tower"), (change_head, "text: logits")],
)
def test_the_first_part_that_differs_is_named(folders, change, part, capsys, monkeypatch):
    def load(*args, **how):
        change(model := true_load(*args, **how))
        return model

    true_load = models.load
    monkeypatch.setattr(models, "load", load)
    status, lines, _ = outcome(capsys, folders / "qwen2_5_vl")
    assert (status, lines[-1]) == (1, f"first difference: {part}")
    assert lines[-2].startswith(part) and "first at (" in lines[-2]


def test_templates_and_patches_differ(folders, capsys, monkeypatch):
    read = parity.Processor.load

    def other(path):
        return read(path).configured(max_pixels=16 * 16)

    monkeypatch.setattr(parity.Processor, "load", other)
    assert outcome(capsys, folders / "qwen2_5_vl")[1][-1] == "first difference: media: patches of images"
    monkeypatch.setattr("models.processing.processor.render", lambda *_, **__: "red?")
    assert outcome(capsys, folders / "qwen2")[1][-1] == "first difference: text: template"


@pytest.mark.parametrize(
    ("missing", "more", "message"),
    [("transformers", (), "transformers"), ("torch", (), "import of torch halted"),
     ("", ("--image", "/gone.png"), "/gone.png"), ("", ("--text", "\u00e9"), "cannot be written")],
)  # fmt: skip
def test_what_is_missing_is_one_line(folders, missing, more, message, capsys, monkeypatch):
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    status, _, err = outcome(capsys, folders / "qwen2", *more)
    assert status == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1
