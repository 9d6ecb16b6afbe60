"""`python -m fluxjax.doctor` names the part in which a server differs, the first one in the order of cause."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import pathlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest
from doctor_cases import TEMPLATE, Patient, changed, patient
from rollout_cases import build, full_logprobs
from serve_cases import help_of, refused_flags
from tokenizers import Tokenizer

from fluxjax import doctor
from fluxjax.base.types import Prompt
from fluxjax.batch import fill
from models.inputs import ModelInput
from models.parity import our_parts
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


def other_tokens(a: str, b: str) -> Plant:
    """The ids of two letters are exchanged."""

    def plant(server: Patient) -> None:
        told = json.loads(server.processor.tokenizer.to_str())
        words = told["model"]["vocab"]
        words[a], words[b] = words[b], words[a]
        tokenizer = Tokenizer.from_str(json.dumps(told))
        server.fake.processor = dataclasses.replace(server.processor, tokenizer=tokenizer)

    return plant


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


def exchanged_pictures(server: Patient) -> None:
    """Each of two pictures is where the other one should be."""

    def inputs(prompt: ModelInput) -> ModelInput:
        index_T, shown = prompt.feature_index_T.copy(), np.flatnonzero(prompt.feature_index_T >= 0)
        first, *second = np.split(shown, np.flatnonzero(np.diff(shown) > 1) + 1)
        if second:
            index_T[shown] = index_T[np.concatenate([*second, first])]
        return dataclasses.replace(prompt, feature_index_T=index_T)

    server.fake.inputs = inputs


def other_seconds(server: Patient) -> None:
    """The time between frame pairs is doubled."""

    def inputs(prompt: ModelInput) -> ModelInput:
        shown_T = prompt.token_ids_T == server.processor.tokenizer.token_to_id("<|video_pad|>")
        if not shown_T.any():
            return prompt
        positions_3T, last = prompt.positions_3T.copy(), prompt.positions_3T[:, shown_T].max()
        positions_3T[0, shown_T] = 2 * positions_3T[0, shown_T] - positions_3T[0, shown_T].min()
        later = positions_3T[:, shown_T].max() - last
        positions_3T[:, np.flatnonzero(shown_T)[-1] + 1 :] += later
        return dataclasses.replace(prompt, positions_3T=positions_3T, next_position=prompt.next_position + int(later))

    server.fake.inputs = inputs


def answers_at_tokens(server: Patient) -> None:
    server.fake.inputs = lambda prompt: dataclasses.replace(prompt, next_position=len(prompt))


def other_logprobs(server: Patient) -> None:
    """Log-probs are of the distribution before sampling parameters."""

    def reply(prompt: ModelInput, answer: Any) -> None:
        entries = answer["meta_info"]["output_token_logprobs"]
        for entry, logprob in zip(entries, full_logprobs(server.model, prompt, answer["output_ids"]), strict=True):
            entry[0] = float(logprob)

    server.fake.reply = reply


def other_template_of_media(server: Patient) -> None:
    template = TEMPLATE.replace("<|vision_start|><|image_pad|>", "a <|vision_start|><|image_pad|>")
    server.fake.processor = dataclasses.replace(server.processor, chat_template=template)


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
    """A weight is another one, in its layer or row 1; without a path, all weights are those of an earlier version."""

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
        (other_template_of_media, "template", "image: .*a <.vision_start"),
        (other_tokens("b", "x"), "token ids", "text: .*the trainer"),
        (other_tokens("5", "8"), "token ids", "boxes: .*the trainer"),
        (text_positions, "positions (all axes)", "as for text"),
        (shifted(0, 1), "positions (time)", "shifted by +1"),
        (shifted(1, -1), "positions (height)", "shifted by -1"),
        (shifted(2, 1), "positions (width)", "shifted by +1"),
        (other_seconds, "positions (time)", "video: a video's time is scaled by 2"),
        (answers_at_tokens, "positions (all axes)", "image: the answer's positions go on from the number of tokens"),
        (exchanged_pictures, "pixels", "boxes: the server has the media in reverse order"),
        (other_pixels, "pixels", "image as files: the server's pixels are scaled by mean and deviation 0.5"),
        (other_sizes, "pixels", "tokens in the prompt, the trainer "),
        (sampled(temperature=1.0), "temperature", "without temperature"),
        (unmasked, "sampling mask", "forbidden tokens"),
        (other_logprobs, "sampling mask", "text: log-probs are without sampling mask"),
        (weights("embedding", "table"), "embedding (weights)", "1 of .*embed_tokens"),
        (weights("norm", "scale"), "final norm or head (weights)", "1 of .*model.norm"),
        (weights(*TOWER), "tower (weights)", "the first is that of .*visual.blocks.1"),
        (weights(*DECODER), "layer 1 (weights)", "the first is that of .*layers.1"),
        (weights(), "weights", "checksums"),
        (weights(*TOWER, checksums=False), "tower", "image: .* no fault that the doctor knows"),
        (weights(*DECODER, checksums=False), "decoder", "text: .* no fault that the doctor knows"),
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
    assert checks["pixels"][1].startswith("image: the server computes without the media")


def one_segment(arrays: Callable[..., Any]) -> Callable[..., Any]:
    """Packs all prompts of a row as if they were one."""

    def packed(*given: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
        found, trained = arrays(*given)
        return found | {"segments_BT": np.minimum(found["segments_BT"], 1)}, trained

    return packed


@pytest.mark.slow
def test_rows_that_the_trainer_packs_wrongly_are_named(server: Patient, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(fill, "_arrays", one_segment(fill._arrays))
    status, part, checks = outcome(server, capsys)
    assert (status, part) == (1, "packed rows"), checks


Outputs: TypeAlias = dict[str, Any]


def dumped(
    server: Patient, folder: pathlib.Path, model: Any, passes: int = 1, change: Callable[[Outputs], Outputs] = dict
) -> None:
    """The server writes the tensors of its passes, as SGLang does: each prompt in some passes."""
    torch = pytest.importorskip("torch", reason="parity lane")
    rank, numbers = folder / "TP0_PP0_Rank0_pid1", itertools.count()
    rank.mkdir(parents=True)

    def dump(prompt: ModelInput) -> None:
        states = [torch.tensor(part) for name, part in our_parts(model, prompt).items() if "layer" in name]
        norms = [*(f"model.layers.{number}.input_layernorm" for number in range(1, len(states))), "model.norm"]
        for rows in np.array_split(np.arange(len(prompt)), passes):
            outputs = {norm: [state[rows] * 0, state[rows]] for norm, state in zip(norms, states, strict=True)}
            torch.save(change(outputs), rank / f"Pass{next(numbers):05d}.pt")

    server.fake.dump = dump


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "layer", "part", "said"),
    [
        (DECODER, 0, "layer 0", "text: .* behind layer 0, which is the first layer"),
        (DECODER, 1, "layer 1", r"text: .* behind layer 1, by 0.0e\+00 before this layer"),
        (("norm", "scale"), 3, "decoder", r"text: .* differ by 0.0e\+00 behind .* compare the final norm"),
        (TOWER, 1, "tower", "image: .* behind layer 0"),
    ],
)
def test_the_first_layer_that_differs_is_named(
    server: Patient, path: tuple[str, ...], layer: int, part: str, said: str, capsys: Any, tmp_path: pathlib.Path
) -> None:
    """By dumps of a server that states no checksums."""
    model = changed(server.model, *path, layer=layer, by=3.0)
    server.serve(model)
    server.fake.refused = ("/weights_checker",)
    dumped(server, tmp_path / "dumps", model, passes=2)
    status, found, checks = outcome(server, capsys, "--dumps", str(tmp_path / "dumps"))
    assert (status, found) == (1, part), checks
    assert re.search(said, checks[part][1]), checks[part]


def without_sums(outputs: Outputs) -> Outputs:
    return {name: sums[0] for name, sums in outputs.items()}


def first_tokens(outputs: Outputs) -> Outputs:
    return {name: [part[:5] for part in parts] for name, parts in outputs.items()}


def overwritten(outputs: Outputs) -> Outputs:
    *_, last = outputs.values()
    return dict.fromkeys(outputs, last)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without_sums, "has no residual stream of model.layers.1.input_layernorm"),
        (first_tokens, "has new dumps of 5 tokens"),
        (overwritten, "norms overwrite their input"),
    ],
)
def test_dumps_without_the_states_are_said(
    server: Patient, change: Callable[[Outputs], Outputs], why: str, capsys: Any, tmp_path: pathlib.Path
) -> None:
    weights(*DECODER, checksums=False)(server)
    dumped(server, tmp_path / "dumps", server.model, change=change)
    status, found, checks = outcome(server, capsys, "--dumps", str(tmp_path / "dumps"))
    assert (status, found) == (1, "decoder"), checks
    assert re.search(f"layers cannot be compared: OSError: {tmp_path}.*{why}", checks["decoder"][1]), checks


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
        (["--server", "http://127.0.0.1:9"], "must be given together"),
        (["--server", "http://127.0.0.1:9", "--model", "MODEL", "--config=configs/text.py"], "and without --config"),
        (["--config.rollout.slot=3"], "did you mean"),
        (["--tolerance", "0"], "above 0"),
        (["--dumps", "/gone"], "--dumps DIR needs --server URL"),
        (["--server", "http://127.0.0.1:9", "--model", "MODEL", "--dumps", "/gone"], "--dumps /gone: no such folder"),
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


async def generous(prompt: Prompt, text: str) -> float:
    return 1.0


async def failing(prompt: Prompt, text: str) -> float:
    raise ZeroDivisionError("in a user's reward")


@pytest.mark.parametrize(
    ("ids", "reward", "troubles"),
    [
        ("ad", "exact", []),
        ("abcd", "exact", UNUSABLE),
        ("abcd", "number", [*UNUSABLE, "row 3 (d): the reference 'none of them' is not correct"]),
        ("a", "test_doctor:generous", ["row 0 (a): an empty answer is correct"]),
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


TOLD = "Driver Version: 570.1   CUDA Version: 12.8 |"


@pytest.mark.parametrize(
    ("versions", "triton", "broken", "part", "said"),
    [
        ({"jax-cuda12-plugin": "JAXLIB"}, "", (), None, ""),
        ({"jax-cuda12-plugin": "0.1"}, "", (), "driver and CUDA", "jax-cuda12-plugin 0.1"),
        ({"jax-cuda13-plugin": "JAXLIB"}, "", (), "driver and CUDA", "CUDA 12"),
        ({"jax-cuda12-plugin": "JAXLIB"}, "No module named 'triton'", (), "jax-triton", "No module named"),
        ({"jax-cuda12-plugin": "JAXLIB"}, "", ("models.processing.media.MediaSettings.load",), "decoder", "lost"),
        ({"jax-cuda12-plugin": "JAXLIB"}, "", ("fluxjax.diagnosis.installation.find_sandbox",), None, "lost"),
    ],
)
def test_what_is_wrong_with_a_gpu_host_is_named(
    versions: dict[str, str], triton: str, broken: tuple[str, ...], part: str | None, said: str,
    monkeypatch: Any, capsys: Any,
) -> None:  # fmt: skip
    def lost(*given: Any, **named: Any) -> Any:
        raise OSError("lost")

    def version(package: str, real: Callable[[str], str] = importlib.metadata.version) -> str:
        if "plugin" in package and package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions.get(package, real("jaxlib")).replace("JAXLIB", real("jaxlib"))

    gib = 2**30
    memory = {"bytes_limit": 60 * gib, "bytes_in_use": 20 * gib}
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", memory_stats=lambda: memory)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("fluxjax.diagnosis.installation._driver", lambda: TOLD)
    monkeypatch.setattr("fluxjax.diagnosis.installation.triton_trouble", lambda: triton)
    for name in broken:
        monkeypatch.setattr(name, lost)
    assert doctor.main(["--json"]) == bool(part)
    told = json.loads(capsys.readouterr().out)
    checks = {check["name"]: (check["state"], check["detail"]) for check in told["checks"]}
    assert told["difference"] == part and "device 40.0" in checks["memory"][1], checks
    if part:
        assert checks[part][0] == "differs" and said in checks[part][1]
    elif broken:
        assert checks["bubblewrap"][0] == "cannot be asked" and said in checks["bubblewrap"][1]


def test_help_comes_before_jax() -> None:
    assert "--server URL" in help_of("fluxjax.doctor")
