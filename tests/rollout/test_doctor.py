"""`python -m fluxjax.doctor` names the part in which a server differs, the first one in the order of cause."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from doctor_cases import TEMPLATE, Patient, changed, patient
from rollout_cases import build
from serve_cases import help_of, refused_flags
from tokenizers import Tokenizer

from fluxjax import doctor
from fluxjax.base.types import Prompt
from models.inputs import ModelInput
from models.processing.settings import HALF
from rollout import wire

pytestmark = pytest.mark.medium
MEDIA = ["image", "boxes", "video"]
FILES = [f"{name} as files" for name in MEDIA]
Plant = Callable[[Patient], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    with patient(tmp_path_factory.mktemp("doctor") / "model") as found:
        yield found


@pytest.fixture(autouse=True)
def healthy(server: Patient) -> None:
    server.fake.reset()
    server.serve(server.model)


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
    names = ["server", "token ids", "template", "weights", "text", *MEDIA, *FILES]
    assert [*checks] == [*names, "packed rows", "sampling"]


def other_template(server: Patient) -> None:
    template = TEMPLATE.replace("assistant", "model")
    server.fake.processor = dataclasses.replace(server.processor, chat_template=template)


def other_tokens(server: Patient) -> None:
    """The ids of two letters are exchanged."""
    told = json.loads(server.processor.tokenizer.to_str())
    words = told["model"]["vocab"]
    words["b"], words["x"] = words["x"], words["b"]
    tokenizer = Tokenizer.from_str(json.dumps(told))
    server.fake.processor = dataclasses.replace(server.processor, tokenizer=tokenizer)


def other_pixels(server: Patient) -> None:
    image = dataclasses.replace(server.processor.image, mean=HALF, std=HALF)
    server.fake.processor = dataclasses.replace(server.processor, image=image)


def other_sizes(server: Patient) -> None:
    server.fake.processor = server.processor.configured(max_pixels=16 * 16)


def shifted(axis: int, by: int) -> Plant:
    def inputs(prompt: ModelInput) -> ModelInput:
        positions_3T = prompt.positions_3T.copy()
        positions_3T[axis] += by * (prompt.feature_index_T >= 0)
        return dataclasses.replace(prompt, positions_3T=positions_3T)

    return lambda server: setattr(server.fake, "inputs", inputs)


def text_positions(server: Patient) -> None:
    def inputs(prompt: ModelInput) -> ModelInput:
        counted_3T = np.broadcast_to(np.arange(len(prompt), dtype=np.int32), (3, len(prompt)))
        return dataclasses.replace(prompt, positions_3T=counted_3T, next_position=len(prompt))

    server.fake.inputs = inputs


def sampled(**changes: Any) -> Plant:
    return lambda server: setattr(server.fake, "sampling", lambda params: params | changes)


def unmasked(server: Patient) -> None:
    sampled(logit_bias={str(id): wire.NEVER for id in server.processor.media_token_ids})(server)


def weights(*path: str, checksums: bool = True) -> Plant:
    """A weight of layer 1 is another one; without a path, all weights are those of an earlier version."""

    def plant(server: Patient) -> None:
        server.serve(changed(server.model, *path, layer=1) if path else build(server.model.config, 1))
        server.fake.refused = () if checksums else ("/weights_checker",)

    return plant


TOWER, DECODER = ("visual", "blocks", "o"), ("layers", "attention", "q")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "part", "said"),
    [
        (other_template, "template", "text: .*model.*assistant"),
        (other_tokens, "token ids", "the trainer"),
        (text_positions, "positions (all axes)", "as for text"),
        (shifted(0, 1), "positions (time)", "shifted by +1"),
        (shifted(1, -1), "positions (height)", "shifted by -1"),
        (shifted(2, 1), "positions (width)", "shifted by +1"),
        (other_pixels, "pixels", "image as files: its pixels are by mean and deviation 0.5"),
        (other_sizes, "pixels", "tokens, the trainer's"),
        (sampled(temperature=1.0), "temperature", "without temperature"),
        (unmasked, "sampling mask", "forbidden tokens"),
        (weights(*TOWER), "tower (weights)", "first that of .*visual.blocks.1"),
        (weights(*DECODER), "layer 1 (weights)", "first that of .*layers.1"),
        (weights(), "weights", "checksums"),
        (weights(*TOWER, checksums=False), "tower", "image: .* no suspect"),
        (weights(*DECODER, checksums=False), "decoder", "text: .* no suspect"),
    ],
)
def test_a_planted_fault_is_named(server: Patient, plant: Plant, part: str, said: str, capsys: Any) -> None:
    plant(server)
    status, found, checks = outcome(server, capsys)
    state, detail = [*checks.values()][-1]
    assert (status, found, state) == (1, part, "differs"), checks
    assert re.search(said.replace("+", r"\+"), detail), detail
    assert [*checks][-1] == part  # later parts are not asked


@pytest.mark.slow
def test_media_that_are_lost_on_the_way_are_named(server: Patient, monkeypatch: Any, capsys: Any) -> None:
    def given_prompt(*given: Any) -> ModelInput:
        prompt = wire.given_prompt(*given)
        return dataclasses.replace(prompt, vision=None, feature_index_T=np.full_like(prompt.feature_index_T, -1))

    monkeypatch.setattr("rollout.serve_requests.given_prompt", given_prompt)
    status, part, checks = outcome(server, capsys)
    assert (status, part) == (1, "pixels"), checks
    assert checks["pixels"][1].startswith("image: it computes without the media")


@pytest.mark.parametrize(
    ("planted", "silent", "why"),
    [  # `rollout.serve` itself, and a server that generates nothing
        ({"plain": True}, {"token ids", "template", *FILES}, "this server decodes no files"),
        ({"refused": ("/generate",)}, {"text", *MEDIA, *FILES, "packed rows", "sampling"}, "no such route"),
    ],
)
def test_what_can_not_be_asked_is_said(
    server: Patient, planted: dict[str, Any], silent: set[str], why: str, capsys: Any
) -> None:
    vars(server.fake).update(planted)
    status, part, checks = outcome(server, capsys)
    assert (status, part) == (0, None), checks
    assert {name for name, (state, _) in checks.items() if state == "cannot be asked"} == silent
    assert why in checks["image as files"][1]


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


RECORDS = {
    "a": {"prompt": "abc", "answer": "12"},
    "b": {"prompt": "abc", "answer": None},
    "c": {"prompt": "abc " * 100, "answer": "3"},
    "d": {"prompt": "abc", "answer": "none of them"},
}
UNUSABLE = ["row 1 (b): no answer", "row 2 (c): prompt too long"]


async def failing(prompt: Prompt, text: str) -> float:
    raise ZeroDivisionError("in a user's reward")


@pytest.mark.parametrize(
    ("ids", "reward", "troubles"),
    [
        ("ad", "exact", []),
        ("abcd", "exact", UNUSABLE),
        ("abcd", "number", [*UNUSABLE, "row 3 (d): the reference 'none of them' is not correct"]),
        ("a", "test_doctor:failing", ["row 0 (a): ZeroDivisionError: in a user's reward"]),
    ],
)
def test_records_and_rewards_that_fail_are_named(
    ids: str, reward: str, troubles: list[str], capsys: Any, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"id": id, **RECORDS[id]}) + "\n" for id in ids))
    source = "--config.data.sources.reverse"
    flags = ["--config=configs/text.py:debug", f"{source}.path={file}", f"{source}.reward={reward}"]
    assert doctor.main([*flags, "--json"]) == bool(troubles)
    told = json.loads(capsys.readouterr().out)
    checks = {check["name"]: (check["state"], check["detail"]) for check in told["checks"]}
    assert {"devices", "driver and CUDA", "jax-triton", "memory", "bubblewrap"} < {*checks}
    assert checks["decoder"] == ("ok", "an image and a video")
    assert told["difference"] == ("data reverse" if troubles else None)
    looked, *lines = checks["data reverse"][1].split("; ")
    assert lines == troubles and str(file) in looked and reward in looked


def test_a_gpu_that_jax_does_not_see_is_named(monkeypatch: Any, capsys: Any) -> None:
    told = "| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8 |"
    monkeypatch.setattr("fluxjax.diagnosis.installation._driver", lambda: told)
    monkeypatch.delenv("JAX_PLATFORMS")
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["devices", "differs"] and "pip install 'fluxjax[cuda12]'" in lines[-1]
    assert "driver 570.1, CUDA 12" in lines[1] and lines[-2] == "first difference: devices"


def test_help_comes_before_jax() -> None:
    assert "--server URL" in help_of("fluxjax.doctor")
