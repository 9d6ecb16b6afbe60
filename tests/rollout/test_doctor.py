"""`python -m fluxjax.doctor` names the part in which a server differs, the first one in the order of cause."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from doctor_cases import TEMPLATE, FakeSGLang, Patient, changed, patient
from rollout_cases import build
from serve_cases import help_of, refused_flags
from tokenizers import Tokenizer

from fluxjax import doctor
from fluxjax.diagnosis.probes import blind
from models.inputs import ModelInput
from rollout import wire

pytestmark = pytest.mark.medium
MEDIA = ["image", "boxes", "video"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    with patient(tmp_path_factory.mktemp("doctor") / "model") as found:
        yield found


@pytest.fixture(autouse=True)
def healthy(server: Patient) -> None:
    server.fake.reset()


def outcome(server: Patient, capsys: Any, *more: str) -> tuple[int, Any, dict[str, tuple[str, str]]]:
    """(exit status, the name of the part that differs, states and details by the name of the check)."""
    flags = ["--server", server.address, "--model", str(server.folder), "--text", "which of the 3 boxes is red?"]
    status = doctor.main([*flags, *more, "--json"])
    out, err = capsys.readouterr()
    assert not err and out.count("\n") == 1, err
    told = json.loads(out)
    assert bool(told["fix"]) == bool(told["difference"])
    return status, told["difference"], {check["name"]: (check["state"], check["detail"]) for check in told["checks"]}


@pytest.mark.slow
def test_nothing_differs(server: Patient, capsys: Any) -> None:
    status, part, checks = outcome(server, capsys)
    assert (status, part) == (0, None), checks
    assert {state for state, _ in checks.values()} == {"ok"}, checks
    names = ["server", "token ids", "template", "weights", "text", *MEDIA, *(f"{name} as files" for name in MEDIA)]
    assert [*checks] == [*names, "packed rows", "sampling"]


def other_template(fake: FakeSGLang) -> None:
    fake.processor = dataclasses.replace(fake.processor, chat_template=TEMPLATE.replace("assistant", "model"))


def other_tokens(fake: FakeSGLang) -> None:
    """The ids of two letters are exchanged."""
    told = json.loads(fake.processor.tokenizer.to_str())
    words = told["model"]["vocab"]
    words["b"], words["x"] = words["x"], words["b"]
    fake.processor = dataclasses.replace(fake.processor, tokenizer=Tokenizer.from_str(json.dumps(told)))


def other_pixels(fake: FakeSGLang) -> None:
    image, half = fake.processor.image, (0.5, 0.5, 0.5)
    fake.processor = dataclasses.replace(fake.processor, image=dataclasses.replace(image, mean=half, std=half))


def other_sizes(fake: FakeSGLang) -> None:
    fake.processor = fake.processor.configured(max_pixels=16 * 16)


def shifted(axis: int, by: int) -> Callable[[FakeSGLang], None]:
    def plant(fake: FakeSGLang) -> None:
        def inputs(prompt: ModelInput) -> ModelInput:
            positions_3T = prompt.positions_3T.copy()
            positions_3T[axis] += by * (prompt.feature_index_T >= 0)
            return dataclasses.replace(prompt, positions_3T=positions_3T)

        fake.inputs = inputs

    return plant


def text_positions(fake: FakeSGLang) -> None:
    def inputs(prompt: ModelInput) -> ModelInput:
        counted_3T = np.broadcast_to(np.arange(len(prompt), dtype=np.int32), (3, len(prompt)))
        return dataclasses.replace(prompt, positions_3T=counted_3T, next_position=len(prompt))

    fake.inputs = inputs


def unmasked(fake: FakeSGLang) -> None:
    media = {str(id): wire.NEVER for id in fake.processor.media_token_ids}
    fake.sampling = lambda params: params | {"logit_bias": media}


def hot(fake: FakeSGLang) -> None:
    fake.sampling = lambda params: params | {"temperature": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "part", "said"),
    [
        (other_template, "template", "text: .*model.*assistant"),
        (other_tokens, "token ids", "from token"),
        (text_positions, "positions (all axes)", "as for text"),
        (shifted(0, 1), "positions (time)", "shifted by +1"),
        (shifted(1, -1), "positions (height)", "shifted by -1"),
        (shifted(2, 1), "positions (width)", "shifted by +1"),
        (other_pixels, "pixels", "image as files: its pixels are by mean and deviation 0.5"),
        (other_sizes, "pixels", "tokens, the trainer's"),
        (hot, "temperature", "without temperature"),
        (unmasked, "sampling mask", "forbidden tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else None,
)
def test_a_planted_fault_is_named(
    server: Patient, plant: Callable[[FakeSGLang], None], part: str, said: str, capsys: Any
) -> None:
    plant(server.fake)
    status, found, checks = outcome(server, capsys)
    state, detail = [*checks.values()][-1]
    assert (status, found, state) == (1, part, "differs"), checks
    assert re.search(said.replace("+", r"\+"), detail), detail
    assert [*checks][-1] == part  # later parts are not asked


@pytest.mark.slow
def test_media_that_are_lost_on_the_way_are_named(server: Patient, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("rollout.serve_requests.given_prompt", lambda *given: blind(wire.given_prompt(*given)))
    status, part, checks = outcome(server, capsys)
    assert (status, part) == (1, "pixels"), checks
    assert checks["pixels"][1].startswith("image: it computes without the media")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "checksums", "part"),
    [
        (("visual", "blocks", "o"), True, "tower (weights)"),
        (("layers", "attention", "q"), True, "layer 1 (weights)"),
        (("visual", "blocks", "o"), False, "tower"),
        (("layers", "attention", "q"), False, "decoder"),
        (None, True, "weights"),
    ],
)
def test_other_weights_are_named(
    server: Patient, change: tuple[str, ...] | None, checksums: bool, part: str, capsys: Any
) -> None:
    """One weight of a layer was changed, or all are those of an earlier version (None)."""
    server.serve(build(server.model.config, 1) if change is None else changed(server.model, *change, layer=1))
    server.fake.refused = () if checksums else ("/weights_checker",)
    try:
        status, found, checks = outcome(server, capsys)
    finally:
        server.serve(server.model)
    assert (status, found) == (1, part), checks
    assert [*checks][-1] == part and checks[part][0] == "differs"


def test_rollout_serve_itself_is_compared_by_its_folder(server: Patient, capsys: Any, tmp_path: pathlib.Path) -> None:
    """`rollout.serve` has no routes for texts and reads no files; its folder on this host has templates and tokens."""
    server.fake.plain = True
    status, part, checks = outcome(server, capsys)
    assert (status, part) == (0, None), checks
    assert all("by the files of" in checks[name][1] for name in ("template", "token ids"))
    assert {name for name, (state, _) in checks.items() if state != "ok"} == {f"{name} as files" for name in MEDIA}
    assert "this server decodes no files" in checks["image as files"][1]
    folder = shutil.copytree(server.folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("assistant", "model"))
    assert doctor.main(["--server", server.address, "--model", str(folder), "--text", "a"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "first difference: template" and lines[-1].startswith("likely fix: ")
    assert lines[1].split()[:2] == ["template", "differs"] and len(lines) == 4


def test_what_can_not_be_asked_is_said(server: Patient, capsys: Any) -> None:
    server.fake.refused = ("/generate",)
    status, part, checks = outcome(server, capsys)
    assert (status, part) == (0, None)
    assert {state for name, (state, _) in checks.items() if name in ("text", *MEDIA, "sampling")} == {"cannot be asked"}
    assert "no such route" in checks["text"][1]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--server", "http://127.0.0.1:9", "--model", "MODEL"], "http://127.0.0.1:9/model_info: "),
        (["--server", "http://127.0.0.1:9", "--model", "/gone"], "/gone: no such folder"),
        (["--server", "http://127.0.0.1:9", "--model", "MODEL", "--text", "\u00e9"], "cannot be written"),
        (["--server", "http://127.0.0.1:9"], "go together"),
        (["--server", "http://127.0.0.1:9", "--model", "MODEL", "--config=configs/text.py"], "take no --config"),
        (["--config.rollout.slot=3"], "did you mean"),
        (["--tolerance", "0"], "above 0"),
    ],
)
def test_wrong_input_is_one_line(server: Patient, flags: list[str], complaint: str, capsys: Any) -> None:
    flags = [str(server.folder) if flag == "MODEL" else flag for flag in flags]
    if "--text" not in flags and "--model" in flags:
        flags += ["--text", "a"]
    refused_flags(doctor.main, flags, complaint, capsys)


RECORDS = [
    {"id": "a", "prompt": "abc", "answer": "12"},
    {"id": "b", "prompt": "abc", "answer": None},
    {"id": "c", "prompt": "abc " * 100, "answer": "3"},
    {"id": "d", "prompt": "abc", "answer": "none of them"},
]


@pytest.mark.parametrize(("reward", "rows", "failed"), [("number", 1, "number calls 1 of 2"), ("exact", 0, "")])
def test_records_and_rewards_that_fail_are_named(
    reward: str, rows: int, failed: str, capsys: Any, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    source = "--config.data.sources.reverse"
    flags = ["--config=configs/text.py:debug", f"{source}.path={file}", f"{source}.reward={reward}"]
    assert doctor.main([*flags, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    checks = {check["name"]: (check["state"], check["detail"]) for check in told["checks"]}
    assert {"devices", "driver and CUDA", "jax-triton", "memory", "bubblewrap"} < {*checks}
    assert checks["decoder"] == ("ok", "an image and a video") and told["difference"] == "data reverse"
    state, detail = checks["data reverse"]
    assert state == "differs" and detail.startswith(f"2 of 4 of 4 records of {file} can't be used")
    assert f"row 1 (b): no answer: {file}:2" in detail and "row 2 (c): prompt too long" in detail
    state, detail = checks["reward of reverse"]
    assert state == ("differs" if rows else "ok") and failed in detail and ("row 3 (d)" in detail) == bool(rows)


def test_a_gpu_that_jax_does_not_see_is_named(monkeypatch: Any, capsys: Any) -> None:
    told = "| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8 |"
    monkeypatch.setattr("fluxjax.diagnosis.installation._driver", lambda: told)
    monkeypatch.delenv("JAX_PLATFORMS")
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["devices", "differs"] and "pip install 'fluxjax[cuda12]'" in lines[-1]
    assert "driver 570.1 (CUDA 12)" in lines[1] and lines[-2] == "first difference: devices"


def test_help_comes_before_jax() -> None:
    assert "--server URL" in help_of("fluxjax.doctor")
