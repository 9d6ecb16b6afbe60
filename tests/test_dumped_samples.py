"""A run's samples: written, shown in one page, and computed again."""

import base64
import fnmatch
import hashlib
import html.parser
import io
import json
import pathlib
import re
import shutil
import subprocess
import tomllib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from run_cases import COLOURS, POLICIES, Diary, colours, flags, trained
from turns import third_of

from fluxjax import recompute, view
from fluxjax.base.medium import Media, MediaKind
from fluxjax.base.scored import bytes_of, numbers_of
from fluxjax.base.types import ENVIRONMENT, Group, Prompt, Response, Reward, Sample
from fluxjax.report import page as pages
from fluxjax.report.samples import dump_samples, dumped_steps, pieces, read_samples

ROOT = pathlib.Path(__file__).resolve().parent.parent
NODE = shutil.which("node")
STEPS = 3
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "</script ",
    "]]>--></title></textarea><img src=x onerror=alert(1)>",
    "\"'`${alert(1)}\\",
    "&lt;b&gt; &amp; &#x3c;",
    "{{data}} {{script}}",
    "\u202egnirts\u202c \u2066x\u2069 \u200b\ufeff",
    "\x00\x01\x1b[31m\r\n\t\x7f\x85\u2028\u2029",
    "\ud800 \udfff",
    "שלום abc 😀",
    "__proto__",
]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> tuple[pathlib.Path, Diary]:
    """A run with images and videos, whose responses have tokens of one version or of several."""
    folder = tmp_path_factory.mktemp("fitted")
    own: dict[str, object] = {
        "steps": STEPS,
        "checkpoint__every": 1,
        "checkpoint__keep": 9,
        "report__dump_samples_every": 1,
        "model__tiny__num_layers": 1,
        "model__tiny__vision_depth": 1,
        "model__tiny__vision_full_attention_layers": "(0,)",
        "warm_start__steps": 0,
        "evaluation__every": 0,
        "evaluation__samples": 1,
        "rollout__max_new_tokens": 12,
        "rollout__steps_per_sync": 1,
    }
    diary = Diary()
    arguments = ["--config.policy=april", *flags(**colours(folder), **POLICIES["april"], **own)]
    trained(folder / "run", "configs/vlm.py", arguments, diary)
    return folder / "run", diary


class Contents(html.parser.HTMLParser):
    """The elements of a page with their attributes, and the texts of its scripts, as a browser reads them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
            self._inside = True

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


EMPTY = [element for element, _ in Contents((ROOT / "fluxjax/report/view.html").read_text()).elements]


def contents(file: pathlib.Path) -> Contents:
    text = file.read_bytes().decode("ascii")
    found = Contents(text)
    assert [element for element, _ in found.elements] == EMPTY, "data have no elements"
    assert len(found.scripts) == 2 and not set("<>&") & set(found.scripts[0])
    for _, attributes in found.elements:
        assert not attributes.keys() & {"src", "href", "onerror", "onload"}, "the page asks nobody for anything"
    return found


def shown(file: pathlib.Path, **filters: object) -> dict[str, Any]:
    """Runs the page's script in node, and returns the texts that it shows."""
    if NODE is None:
        pytest.skip("needs node, which runs the page's script")
    command = [NODE, str(ROOT / "tests" / "page_dom.js"), str(file), json.dumps(filters)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- a real run ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_of_a_run_has_what_was_trained_on(fitted, tmp_path, capsys) -> None:
    run_dir, diary = fitted
    assert view.main([str(run_dir), "--out", str(tmp_path / "page.html")]) == 0
    assert re.search(
        rf"{8 * STEPS} samples \(steps: {STEPS}\), \d+ pictures, 0\.\d MB$", capsys.readouterr().out.strip()
    )
    data = contents(tmp_path / "page.html").data
    responses = {sample.response.data: sample for sample in diary.samples}
    records = {(step, line): r for step in dumped_steps(run_dir) for line, r in enumerate(read_samples(run_dir, step))}
    assert len(data["samples"]) == len(records) == 8 * STEPS
    several = 0
    for entry in data["samples"]:
        record, tokens = records[entry["step"], entry["line"]], entry["tokens"]
        sample = responses[base64.b64decode(record["numbers"])]
        response = sample.response
        assert tokens["ids"] == list(response.token_ids)
        np.testing.assert_allclose(tokens["logprobs"], response.logprobs, atol=1e-4)
        assert [v for v, count in tokens["versions"] for _ in range(count)] == list(response.versions)
        assert re.sub(r"<\|\w+\|>", "", "".join(tokens["texts"])) == record["response"] == entry["response"]
        assert (entry["reward"], entry["advantage"]) == (round(sample.reward.value, 4), round(sample.advantage, 4))
        several += len(tokens["versions"]) > 1
    assert several, "the run has responses of several versions"
    assert {"rollout", "reward", "train"} <= data["seconds"]["3"].keys()
    assert (
        len(data["media"]) == len({ref[1] for entry in data["samples"] for ref in entry["media"]}) <= 2 * len(COLOURS)
    )
    for key, medium in data["media"].items():
        with Image.open(io.BytesIO(base64.b64decode(medium["picture"].partition(",")[2]))) as picture:
            picture.load()
        assert max(picture.size) <= 4 * pages.SIDE
        colour = next(colour for name, colour in COLOURS.items() if name in key)
        corner = np.asarray(picture.convert("RGB"))[-1, -1]
        assert np.abs(corner.astype(int) - colour).max() < 30, "the picture is that of the file"


@pytest.mark.slow
def test_the_script_shows_tokens_with_their_numbers(fitted, tmp_path) -> None:
    run_dir, _ = fitted
    assert view.main([str(run_dir), "--step", "3", "--out", str(tmp_path / "page.html")]) == 0
    result = shown(tmp_path / "page.html", order="step")
    assert result["count"] == "8 of 8 samples"
    for line, (row, record) in enumerate(zip(result["pages"][0], read_samples(run_dir, 3), strict=True)):
        numbers = numbers_of(base64.b64decode(record["numbers"]))
        assert f"--step 3 --sample {line}" in row["text"] and f"{len(numbers.tokens)} tokens" in row["text"]
        assert "seconds of the step" in row["text"] and "rollout" in row["text"]
        assert len(row["images"]) == len(record["media"]) and row["images"][0].startswith("data:image/jpeg;base64,")
        titles = [title for _, title, _ in row["tokens"] if title != "reward"]
        for title, id, logprob, version in zip(titles, numbers.tokens, numbers.logprobs, numbers.versions, strict=True):
            said = re.fullmatch(r"model, id (\d+), log-prob (\S+), version (\d+)", title)
            assert said and (int(said[1]), int(said[3])) == (id, version) and abs(float(said[2]) - logprob) < 1e-4
    source = result["sources"][0]
    assert 0 < len(shown(tmp_path / "page.html", source=source)["pages"][0]) < 8
    assert shown(tmp_path / "page.html", low="2")["count"] == "0 of 8 samples"


def copied(run_dir: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A copy whose files may be changed, with the run's checkpoints."""
    shutil.copytree(run_dir, folder, ignore=shutil.ignore_patterns("checkpoints", "model"))
    (folder / "checkpoints").symlink_to(run_dir / "checkpoints")
    return folder


def rewrite(run_dir: pathlib.Path, step: int, line: int, **fields: object) -> None:
    records = read_samples(run_dir, step)
    records[line] |= fields
    (run_dir / "samples" / f"{step:06d}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


INITIAL, ONE, SEVERAL = "initial weights", "one version", "several versions"


def found(run_dir: pathlib.Path, kind: str) -> tuple[int, int]:
    """The step and line of a response of at least two tokens, whose tokens have these versions: the last of a group."""
    versions = {INITIAL: lambda v: v == [0], ONE: lambda v: len(v) == 1 and v[0] > 0, SEVERAL: lambda v: len(v) > 1}
    samples = [
        (numbers_of(base64.b64decode(record["numbers"])).sample, step, line)
        for step in dumped_steps(run_dir)
        for line, record in enumerate(read_samples(run_dir, step))
        if len(record["pieces"]) >= 2 and versions[kind](record["versions"])
    ]
    return max(samples)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INITIAL, ONE, SEVERAL])
def test_a_response_is_computed_again(fitted, kind, capsys) -> None:
    step, line = found(fitted[0], kind)
    assert not (fitted[0] / "checkpoints" / "0").exists(), "the initial weights have no checkpoint"
    assert recompute.main([str(fitted[0]), "--step", str(step), "--sample", str(line)]) == 0
    said = re.fullmatch(
        r"the same; (\d+) equal tokens, whose log-probs differ by at most (\S+)", capsys.readouterr().out.strip()
    )
    assert said and int(said[1]) == len(read_samples(fitted[0], step)[line]["pieces"]) and float(said[2]) < 1e-5


@pytest.mark.slow
def test_another_response_is_named_by_its_first_token_that_differs(fitted, tmp_path, capsys) -> None:
    run_dir = copied(fitted[0], tmp_path / "run")
    step, line = found(run_dir, ONE)
    numbers = numbers_of(base64.b64decode(read_samples(run_dir, step)[line]["numbers"]))
    tokens = numbers.tokens.tolist()
    there, tokens[1] = tokens[1], 3 + (tokens[1] == 3)
    data = bytes_of(numbers.sample, None, tokens, numbers.logprobs.tolist(), numbers.versions.tolist())
    rewrite(run_dir, step, line, numbers=base64.b64encode(data).decode())
    assert recompute.main([str(run_dir), "--step", str(step), "--sample", str(line)]) == 1
    assert re.match(rf"different: token 1 is {there} \(.*\), not {tokens[1]} \(.*\); 1 equal", capsys.readouterr().out)


def weights_gone(run_dir: pathlib.Path) -> None:
    (run_dir / "checkpoints").unlink()
    (run_dir / "checkpoints" / "9").mkdir(parents=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "arguments", "expected"),
    [
        (lambda run_dir: None, ["--step", "9", "--sample", "0"], "no samples of step 9, only of 3, 2, 1"),
        (lambda run_dir: None, ["--step", "3", "--sample", "8"], "no such sample"),
        (weights_gone, ["--step", "3", "--sample", "0"], "of the weights after step .*, but checkpoints are of step 9"),
        (lambda run_dir: rewrite(run_dir, 3, 0, numbers="AAAA"), ["--step", "3", "--sample", "0"], "damaged"),
        (lambda run_dir: (run_dir / "config.json").unlink(), ["--step", "3", "--sample", "0"], "is not a run folder"),
    ],
)
def test_a_response_that_cannot_be_computed_ends_in_one_line(
    fitted, tmp_path, change, arguments, expected, capsys
) -> None:
    run_dir = copied(fitted[0], tmp_path / "run")
    change(run_dir)
    assert recompute.main([str(run_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"error: .*{expected}.*\n", error), error


@pytest.mark.slow
def test_a_changed_prompt_is_refused(fitted, tmp_path, capsys) -> None:
    run_dir = copied(fitted[0], tmp_path / "run")
    rewrite(run_dir, 1, 0, prompt="<image>Shape?")
    assert recompute.main([str(run_dir), "--step", "1", "--sample", "0"]) == 2
    assert "has changed" in capsys.readouterr().err


# --- hostile texts, old folders, bounds ---------------------------------------------------------


def group(texts: dict[str, str], media: tuple[Media, ...] = (), tokens: int = 3, draw: int = 0) -> Group:
    prompt = Prompt(texts["id"], texts["source"], texts["prompt"], texts["answer"], media, draw=draw)
    ids = tuple(range(tokens))
    response = Response(
        f"{draw:08d}.00/0", draw, 0, ids, tuple(-0.5 * id for id in ids), (1,) * tokens, texts["finish"]
    )
    reward = Reward(0.5, True, texts["reason"], {texts["part"]: 1.0}, seconds=0.25)
    return Group(prompt, (Sample(response, reward, -0.25),))


def dumped(run_dir: pathlib.Path, groups: list[Group], words: list[str] | None = None, step: int = 1) -> pathlib.Path:
    run_dir.mkdir(exist_ok=True)
    words = words or ["a", "b", "c"]

    def decode(ids, *, skip_special_tokens=True) -> str:
        return "".join(words[id % len(words)] for id in ids)

    dump_samples(run_dir, step, groups, decode, len(groups))
    return run_dir


NAMES: list[str] = ["id", "source", "prompt", "answer", "finish", "reason", "part"]
PLAIN = dict.fromkeys(NAMES, "x")


@pytest.mark.medium
@settings(max_examples=third_of(60))
@given(drawn=st.lists(st.lists(st.sampled_from(HOSTILE), max_size=3).map("".join), min_size=8, max_size=8))
def test_hostile_texts_come_back_and_are_no_elements(tmp_path_factory, drawn) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    texts = dict(zip(NAMES, drawn, strict=False))
    dumped(folder, [group(texts)], [drawn[-1], "b", "c"])
    assert view.main([str(folder)]) == 0
    (entry,) = contents(folder / "view.html").data["samples"]
    for name in ("id", "source", "prompt", "answer", "finish", "reason"):
        assert entry[name] == texts[name]
    assert entry["parts"] == {texts["part"]: 1.0} and entry["tokens"]["texts"] == [drawn[-1], "b", "c"]


@pytest.mark.medium
def test_the_script_shows_hostile_texts_as_texts(tmp_path) -> None:
    run_dir = dumped(tmp_path, [group(dict.fromkeys(NAMES, text), draw=n) for n, text in enumerate(HOSTILE)], HOSTILE)
    assert view.main([str(run_dir)]) == 0
    rows = shown(run_dir / "view.html")["pages"][0]
    assert len(rows) == len(HOSTILE)
    for row, text in zip(rows, HOSTILE, strict=True):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]", row["text"])
        for word in re.findall(r"[\w</>(){}$]+", text):
            assert word in row["text"]
    assert "\u27e8U+202E\u27e9gnirts" in rows[7]["text"] and "\u27e8U+D800\u27e9" in rows[9]["text"]


def test_the_policy_of_the_page_allows_its_script_only(tmp_path) -> None:
    dumped(tmp_path, [group(PLAIN)])
    assert view.main([str(tmp_path)]) == 0
    found = contents(tmp_path / "view.html")
    policy = next(a["content"] for tag, a in found.elements if tag == "meta" and "http-equiv" in a) or ""
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


@pytest.mark.medium
def test_folders_of_earlier_releases_and_damaged_lines_make_a_page(tmp_path, capsys) -> None:
    old = {"step": 5, "source": "a", "id": "1", "prompt": "<image>?", "media": ["gone.png"], "answer": "7"}
    old |= {"response": "8", "finish": "stop", "reward": float("nan"), "reason": "", "parts": {}, "versions": [4]}
    (tmp_path / "samples").mkdir()
    lines = [json.dumps(old), "[1]", json.dumps(old | {"numbers": "AAAA"}), '{"step": 5, "sou']
    (tmp_path / "samples" / "000005.jsonl").write_text("\n".join(lines))
    assert view.main([str(tmp_path)]) == 0
    assert "2 samples (steps: 1), 0 pictures, 0.0 MB; 2 lines of samples are damaged" in capsys.readouterr().out
    data = contents(tmp_path / "view.html").data
    assert data["samples"][0]["reward"] is None and "damaged" in data["samples"][1]["tokens"]
    if NODE:
        result = shown(tmp_path / "view.html")
        assert "wrote no tokens" in result["pages"][0][0]["text"] and "gone.png: " in result["pages"][0][0]["text"]


def test_size_and_pictures_are_bounded(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(pages, "MOST_PICTURES", 2)
    rng = np.random.default_rng(0)
    media = []
    for number in range(4):
        Image.fromarray(rng.integers(0, 255, (400, 300, 3), np.uint8)).save(tmp_path / f"{number}.png")
        media.append(Media(MediaKind.IMAGE, str(tmp_path / f"{number}.png")))
    groups = [group(PLAIN | {"prompt": "<image>" * 4}, tuple(media), 500, draw=n) for n in range(40)]
    dumped(tmp_path, groups, step=1)
    dumped(tmp_path, groups, step=2)
    assert view.main([str(tmp_path), "--megabytes", "0.5"]) == 0
    left_out = re.search(r"(\d+) samples are left out", capsys.readouterr().out)
    text = (tmp_path / "view.html").read_text()
    data = contents(tmp_path / "view.html").data
    assert left_out and int(left_out[1]) == 80 - len(data["samples"]) and 20 < len(data["samples"]) < 80
    assert data["samples"][0]["step"] == 2 and 0.4e6 < len(text) < 0.53e6
    assert sum(medium["picture"] != "" for medium in data["media"].values()) == 2
    assert all(len(medium["picture"]) < 150_000 for medium in data["media"].values())
    if NODE:
        result = shown(tmp_path / "view.html")
        assert len(result["pages"][0]) <= 50
        assert sum(map(len, result["pages"])) == len(data["samples"])


def test_media_without_files_are_kept_by_their_content(tmp_path) -> None:
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 30, 30)).save(content, "PNG")
    media = (Media(MediaKind.IMAGE, "data:image/png... (99 characters)", data=content.getvalue()),)
    media += (Media(MediaKind.IMAGE, "https://nowhere.example/a.png"), Media(MediaKind.IMAGE, str(tmp_path / "no.png")))
    dumped(tmp_path, [group(PLAIN, media)] * 2)
    assert view.main([str(tmp_path)]) == 0
    (kept,) = (tmp_path / "media").iterdir()
    assert kept.read_bytes() == content.getvalue()
    first, url, missing = contents(tmp_path / "view.html").data["media"].values()
    assert first["picture"] and not url["picture"] and "URL" in url["why"] and "no such file" in missing["why"]


IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
WORDS = ["a", "b", "c", "see", IMAGE, VIDEO]
EPISODE = [
    ("m", 3, [0, 1]),
    ("e", 0, [3, 4, 4, 4, 0, 4, 3]),
    ("m", 3, [2]),
    ("m", 4, [1]),
    ("e", 0, [5, 5, 3, 5]),
    ("m", 4, [0]),
]


def episode(run_dir: pathlib.Path) -> Group:
    """Three turns; the first observation shows two images, the second a video whose placeholders have two runs."""
    folder = run_dir / "observations"
    folder.mkdir(parents=True)
    for name, colour in COLOURS.items():
        Image.new("RGB", (56, 28), colour).save(folder / name, "PNG")
    names = list(COLOURS)[:2]
    media = tuple(Media(MediaKind.IMAGE, str(folder / name)) for name in names)
    media += (Media(MediaKind.VIDEO, str(folder / "gone")),)
    numbers = [(id, version if who == "m" else ENVIRONMENT) for who, version, ids in EPISODE for id in ids]
    ids, versions = zip(*numbers, strict=True)
    logprobs = tuple(0.0 if version == ENVIRONMENT else -0.5 * (id + 1) for id, version in numbers)
    response = Response(
        "00000000.00/0", 0, 0, ids, logprobs, versions, "stop", None, media, (0.25, -0.5, 1.0), media_counts=(2, 1)
    )
    return Group(Prompt("x", "s", "x", "x"), (Sample(response, Reward(0.75, True), -0.25),))


def test_an_episode_is_shown_turn_by_turn_with_its_images(tmp_path) -> None:
    """The files of observations are found again in a folder that was moved."""
    run_dir = tmp_path / "run"
    dumped(run_dir, [episode(run_dir), group(PLAIN, draw=1)], WORDS)
    run_dir = run_dir.rename(tmp_path / "moved")
    assert view.main([str(run_dir)]) == 0
    data = contents(run_dir / "view.html").data
    first, second = (f"image\nobservations/{name}\n\n" for name in list(COLOURS)[:2])
    assert data["media"][first]["picture"] and data["media"][second]["picture"]
    assert "no such file" in data["media"]["video\nobservations/gone\n\n"]["why"]
    shows, one_turn = shown(run_dir / "view.html")["pages"][0]
    assert shows["images"] == [data["media"][first]["picture"], data["media"][second]["picture"]]
    for says in (
        "modelturn 1 of 3 \u00b7 2 tokens \u00b7 log-prob -1.500 \u00b7 reward 0.2500v3abenvironment",
        "modelturn 2 of 3 \u00b7 2 tokens \u00b7 log-prob -2.500 \u00b7 reward -0.5000v3cv4benvironment",
        "modelturn 3 of 3 \u00b7 1 tokens \u00b7 log-prob -0.500 \u00b7 reward 1.0000v4a",
        f"environmentsee{IMAGE} \u00d7 3a{IMAGE}seemodel",
        f"environment{VIDEO} \u00d7 2observations/gone",
    ):
        assert says in shows["text"]
    assert shows["text"].index("observations/gone") < shows["text"].index("turn 3"), "the video is in its observation"
    titles = [title for _, title, _ in shows["tokens"] if title.startswith(("model", "environment"))]
    assert titles[:3] == [
        "model, id 0, log-prob -0.5, version 3",
        "model, id 1, log-prob -1, version 3",
        "environment, id 3",
    ]
    assert len(titles) == 5 + 5 + 3 and "turn " not in one_turn["text"]


def test_folders_without_samples_end_in_one_line(tmp_path, capsys) -> None:
    assert view.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is no run folder with samples")
    dumped(tmp_path, [group(PLAIN)], step=4)
    assert view.main([str(tmp_path), "--step", "3"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} has no samples of step 3, only of 4\n"


@given(st.lists(st.tuples(st.text(st.sampled_from("aé€😀 \n"), max_size=4), st.integers(1, 5))))
def test_pieces_are_the_text(parts) -> None:
    """Tokens of a byte-level tokenizer, some of which end within a character."""
    tokens: list[bytes] = []
    for text, size in parts:
        data = text.encode()
        tokens += [data[start : start + size] for start in range(0, len(data), size)]

    def decode(ids, *, skip_special_tokens=True) -> str:
        assert not skip_special_tokens
        return b"".join(tokens[id] for id in ids).decode(errors="replace")

    texts = pieces(tuple(range(len(tokens))), decode)
    assert len(texts) == len(tokens) and "".join(texts) == b"".join(tokens).decode()


def test_every_file_of_the_packages_is_in_a_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [f"{package}/{pattern}" for package, names in data.items() for pattern in names]
    listed = subprocess.run(
        ["git", "ls-files", "fluxjax", "models", "rollout", "sharding"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("needs a git checkout, which lists the files")
    others = [file for file in listed.stdout.split() if not file.endswith((".py", ".md"))]
    assert "fluxjax/report/view.html" in others
    assert not [file for file in others if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)]
