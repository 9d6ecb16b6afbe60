"""The embedded data sets: real files, the right answers, held-out material apart, built whole or not at all."""

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from store_cases import ROOT, until

from fluxjax.base.errors import DataError
from fluxjax.config import Config, ConfigError, DataConfig, SourceConfig
from fluxjax.data.loader import open_held_out, open_sources, open_warm_start
from fluxjax.tasks import embedded
from fluxjax.tasks.digits import DigitsRecipe, draw_length
from fluxjax.tasks.embedded import StringsRecipe, digest, ensure
from fluxjax.tasks.pans import DIRECTIONS, PansRecipe, encode, load_photos

DIGITS = DigitsRecipe(train=12, held_out=12, warm_start=12)
PANS = PansRecipe(train=6, held_out=6, warm_start=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("embedded")


def manifest(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def strip_of(folder, record):
    with Image.open(folder / record["images"][0]) as image:
        return np.asarray(image)


def frames_of(path):
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_digit_strips_are_png_files_as_long_as_their_answers(root):
    folder = ensure("digits", root, DIGITS)
    for name in ("train", "eval", "warm_start"):
        records = manifest(folder / f"{name}.jsonl")
        assert len(records) == 12
        for record in records:
            assert record["answer"].isdigit() and 1 <= len(record["answer"]) <= 12
            with Image.open(folder / record["images"][0]) as image:
                assert (image.format, image.size) == ("PNG", (16 * len(record["answer"]), 16))


def test_held_out_digits_are_scans_that_training_never_uses(root):
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    order = np.random.default_rng(DIGITS.seed).permutation(len(data.images))
    held_out = set(order[DIGITS.train_scans :])
    cells = {}
    for index, scan in enumerate(data.images):
        pixels = (scan * (255 / 16)).astype(np.uint8)
        cell = np.asarray(Image.fromarray(pixels).resize((16, 16), Image.Resampling.BILINEAR))
        cells.setdefault(cell.tobytes(), set()).add(index)
    folder = ensure("digits", root, DIGITS)
    for record in manifest(folder / "eval.jsonl"):
        strip = strip_of(folder, record)
        for i, digit in enumerate(record["answer"]):
            scans = cells[strip[:, 16 * i : 16 * (i + 1)].tobytes()]
            assert scans <= held_out
            assert {str(data.target[scan]) for scan in scans} == {digit}


@pytest.mark.medium
def test_pictures_grow_with_a_digit(tmp_path, monkeypatch):
    """So that a digit stays one merged feature of a model with larger patches."""
    monkeypatch.setattr(embedded, "RECIPES", {**embedded.RECIPES, "digits": DIGITS})
    monkeypatch.setattr(embedded, "RECIPES", {**embedded.RECIPES, "pans": PANS})
    sources = {"digits": SourceConfig(), "pans": SourceConfig()}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cell, wide in ((16, 16), (28, 28)):
        config = Config(data=DataConfig(sources=sources))
        config.model.tiny["patch_size"] = cell // 2
        opened = open_sources(config)
        for prompt in (opened["digits"][index] for index in range(5)):
            with Image.open(prompt.media[0].path) as strip:
                assert strip.size == (wide * len(prompt.answer), wide)
        with av.open(opened["pans"][0].media[0].path) as clip:
            assert (clip.streams.video[0].width, clip.streams.video[0].height) == (2 * wide, 2 * wide)


def test_the_warm_start_sees_one_scan_of_each_digit_and_every_length(tmp_path):
    recipe = DigitsRecipe(
        train=1, held_out=1, warm_start=24, rotation=0.0, scaling=0.0, shift=0.0, brightness=(1.0, 1.0)
    )
    folder = ensure("digits", tmp_path, recipe)
    seen = {}
    for i, record in enumerate(manifest(folder / "warm_start.jsonl")):
        assert len(record["answer"]) == i % 12 + 1
        strip = strip_of(folder, record)
        for position, digit in enumerate(record["answer"]):
            seen.setdefault(digit, set()).add(strip[:, 16 * position : 16 * (position + 1)].tobytes())
    assert sorted(seen) == list("0123456789") and all(len(cells) == 1 for cells in seen.values())


def test_the_warm_start_sees_a_few_of_the_training_clips(root):
    folder = ensure("pans", root, PANS)
    assert manifest(folder / "warm_start.jsonl") == manifest(folder / "train.jsonl")[:2]


def test_sources_of_the_warm_start(root, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "RECIPES", {**embedded.RECIPES, "digits": DIGITS})
    monkeypatch.setattr(embedded, "RECIPES", {**embedded.RECIPES, "reverse": StringsRecipe(train=30, held_out=5)})
    (tmp_path / "own.jsonl").write_text('{"prompt": "1 + 1", "answer": 2}\n')
    names = {
        "digits": SourceConfig(),
        "reverse": SourceConfig(),
        "own": SourceConfig(path=str(tmp_path / "own.jsonl")),
    }
    sources = open_warm_start(Config(data=DataConfig(sources=names)))
    assert {name: source[0].id for name, source in sources.items()} == {
        "digits": "warm_start-00000",
        "reverse": "train-00000",
        "own": "1",
    }


def test_field_names_of_the_configuration_are_used(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "no", "q": "<image>?", "a": "yes", "picture": "p.png", "n": 7}\n')
    path = str(tmp_path / "x.jsonl")
    source = SourceConfig(
        path=path,
        eval_path=path,
        columns={"prompt": "q", "answer": "a", "images": "picture", "id": "n"},
    )
    config = Config(data=DataConfig(sources={"x": source}))
    for opened in (open_sources(config), open_held_out(config), open_warm_start(config)):
        prompt = opened["x"][0]
        assert (prompt.id, prompt.text, prompt.answer) == ("7", "<image>?", "yes")
        assert prompt.media[0].path == str(tmp_path / "p.png")


def test_digit_lengths_have_a_long_tail():
    rng = np.random.default_rng(0)
    lengths = np.bincount([draw_length(rng, DigitsRecipe()) for _ in range(5000)], minlength=13)
    assert lengths[0] == 0 and len(lengths) == 13 and lengths[12] > 10
    share = np.arange(1, 13) ** -1.5 / (np.arange(1, 13) ** -1.5).sum()
    assert np.abs(lengths[1:] / 5000 - share).max() < 0.03  # four standard deviations of 5,000 draws


def test_clips_move_as_their_answers_say(root):
    folder = ensure("pans", root, PANS)
    for record in manifest(folder / "train.jsonl") + manifest(folder / "eval.jsonl"):
        frames = frames_of(folder / record["videos"][0]).astype(np.float32).mean(-1)
        assert frames.shape == (8, 32, 32)
        errors = {}
        for answer, (dy, dx) in DIRECTIONS.items():
            y, x = 2 * dy, 2 * dx  # the window's step: what was at (y, x) is at (0, 0) a frame later
            later = frames[1:, max(0, -y) : 32 - max(0, y), max(0, -x) : 32 - max(0, x)]
            earlier = frames[:-1, max(0, y) : 32 + min(0, y), max(0, x) : 32 + min(0, x)]
            errors[answer] = np.abs(later - earlier).mean()
        assert min(errors, key=errors.__getitem__) == record["answer"], errors


def test_held_out_clips_show_photographs_that_training_never_shows(root):
    from skimage.feature import match_template

    photos = {name: photo.astype(np.float32).mean(-1) for name, photo in load_photos(PANS).items()}
    assert set(PANS.held_out_photos) < set(photos) and len(photos) >= 15
    folder = ensure("pans", root, PANS)
    for record in manifest(folder / "eval.jsonl")[:3]:
        patch = frames_of(folder / record["videos"][0])[0].astype(np.float32).mean(-1)
        likeness = {name: match_template(photo, patch).max() for name, photo in photos.items()}
        best = max(likeness, key=likeness.__getitem__)
        assert best in PANS.held_out_photos and likeness[best] > 0.9


def test_the_same_frames_give_the_same_file():
    frames = np.random.default_rng(0).integers(0, 255, (8, 32, 32, 3)).astype(np.uint8)
    assert encode(frames, PANS) == encode(frames, PANS)


def test_strings_are_reversed_and_never_in_both_splits(root):
    folder = ensure("reverse", root, StringsRecipe(train=300, held_out=50))
    asked = {}
    for name in ("train", "eval"):
        records = manifest(folder / f"{name}.jsonl")
        for record in records:
            assert record["prompt"] == f"Reverse {record['answer'][::-1]}:"
        asked[name] = {record["prompt"] for record in records}
    assert (len(asked["train"]), len(asked["eval"])) == (300, 50)
    assert not asked["train"] & asked["eval"]


def test_two_builds_are_equal_and_another_recipe_is_another_folder(root, tmp_path):
    first, second = ensure("digits", root, DIGITS), ensure("digits", tmp_path, DIGITS)
    assert first.name == second.name
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 3 * 12 + 4  # pictures, three manifests and the recipe
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes()
    assert (
        digest(DIGITS) != digest(DigitsRecipe(train=12, held_out=12, warm_start=12, seed=1)) != digest(DigitsRecipe())
    )


def test_what_is_there_is_not_built_again(root, monkeypatch):
    folder = ensure("digits", root, DIGITS)
    monkeypatch.setattr(embedded.pathlib.Path, "rename", lambda *_: pytest.fail("built again"))
    assert ensure("digits", root, DIGITS) == folder


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path, capfd):
    ensure("digits", tmp_path, DIGITS)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"digit strips: {n}/36" for n in (9, 18, 27, 36)]


def test_a_source_without_a_path_is_an_embedded_one():
    config = Config(data=DataConfig(sources={"nonsense": SourceConfig()}))
    with pytest.raises(ConfigError, match=r"data.sources.nonsense has no path and is no embedded.*digits, pans"):
        open_sources(config)


def test_sources_open_by_name_and_by_path(root, monkeypatch, caplog):
    monkeypatch.setattr(embedded, "RECIPES", {**embedded.RECIPES, "digits": DIGITS})
    folder = ensure("digits", root, DIGITS)
    mine = SourceConfig(path=str(folder / "train.jsonl"))
    config = Config(data=DataConfig(sources={"digits": SourceConfig(), "mine": mine}))
    monkeypatch.setattr(embedded, "cache_folder", lambda: root)
    sources, held_out = open_sources(config), open_held_out(config)
    assert list(sources) == ["digits", "mine"] and list(held_out) == ["digits"]
    assert sources["mine"][0].text == sources["digits"][0].text == "<image>Digits?"
    assert (sources["mine"][0].source, held_out["digits"][0].id) == ("mine", "eval-00000")
    assert "data.sources.mine has no eval_path" in caplog.text


# --- built whole or not at all ------------------------------------------------------------------


def run(script, *args, **kwargs):
    code = "import sys\n" + textwrap.dedent(script)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, **kwargs)


BUILD = """
    import os, pathlib, time
    from fluxjax.tasks.embedded import build_once
    target = pathlib.Path(sys.argv[1])
    def write(folder):
        with open(target.parent / "builds", "a") as file:
            file.write("x")
        (folder / "first").write_text("1")
        time.sleep(float(sys.argv[2]))
        (folder / "second").write_text("2")
    build_once(target, write)
"""


@pytest.mark.medium
def test_a_killed_build_leaves_nothing_that_the_next_one_trusts(tmp_path):
    target = tmp_path / "set"
    process = run(BUILD, target, 1000)
    until(lambda: list(tmp_path.glob(".set.building-*/first")), seconds=300)
    process.kill()
    process.wait()
    assert not target.exists()
    assert run(BUILD, target, 0).wait() == 0
    assert sorted(path.name for path in target.iterdir()) == ["first", "second"]
    assert not list(tmp_path.glob(".set.building-*"))


@pytest.mark.medium
def test_two_builds_at_once_build_once(tmp_path):
    target = tmp_path / "set"
    processes = [run(BUILD, target, 0.5) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert (tmp_path / "builds").read_text() == "x"
    assert sorted(path.name for path in target.iterdir()) == ["first", "second"]


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_full_disk_is_a_clear_error_and_leaves_nothing(small_disk):
    with pytest.raises(DataError, match=r"cannot be built in .*small.*No space left.*XDG_CACHE_HOME=FOLDER"):
        ensure("digits", small_disk, DigitsRecipe(train=200, held_out=12))
    assert [path.name for path in small_disk.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_a_write_that_fails_is_a_clear_error_and_leaves_nothing(tmp_path):
    script = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        from fluxjax.base.errors import DataError
        from fluxjax.tasks.embedded import ensure
        from fluxjax.tasks.pans import PansRecipe
        try:
            ensure("pans", sys.argv[1], PansRecipe(train=4, held_out=2))
        except DataError as error:
            print(error)
    """
    process = run(script, tmp_path, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert "cannot be built in" in out and "File too large; free some space" in out
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_root_that_is_no_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be built.*; choose another place with XDG_CACHE_HOME"):
        ensure("digits", tmp_path / "file", DIGITS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_that_cannot_be_written_is_a_clear_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="Permission denied; choose another place"):
        ensure("digits", tmp_path, DIGITS)
