"""What a request is on the wire, and that reading it gives the request back."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from protocol_cases import limits, model, prompts
from rollout_cases import request

from models.config import Qwen25VLConfig
from models.inputs import ModelInput
from rollout import wire
from rollout.engine import EngineError, GenerateRequest
from rollout.requests import checked


def body_of(asked: GenerateRequest, samples: int = 1, kind: str = "vl") -> wire.Json:
    asked = checked(asked, limits(kind))
    rids = {sample: f"id-{sample}" for sample in range(samples)}
    return json.loads(json.dumps(wire.request_body(asked, rids, model(kind).config, interval=4)))


@pytest.mark.parametrize("name", ["image", "images", "video", "mixed"])
def test_media_come_back_bit_for_bit(name: str) -> None:
    prompt, config = prompts("vl")[name], model("vl").config
    assert isinstance(config, Qwen25VLConfig)
    body = body_of(request("a", prompt, n=2, prefix=((20, 21), ()), max_new_tokens=8), samples=2)
    for sample, begun in enumerate((2, 0)):
        media = {}
        for field in wire.FIELDS:
            if field in body:
                first, own = (wire.our_media(body[field][place][0]) for place in (0, sample))
                assert first is not None and own is not None and own["key"] == first["key"]
                media[field] = {**first, **own}  # patches are with the first sample
        back = wire.given_prompt(body["input_ids"][sample], begun, media, config)
        same(back, prompt)


def same(one: ModelInput, other: ModelInput) -> None:
    assert one.next_position == other.next_position
    assert one.vision is not None and other.vision is not None
    for part, wanted in ((one, other), (one.vision, other.vision)):
        for field in dataclasses.fields(part):
            value = getattr(wanted, field.name)
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(part, field.name), value, err_msg=field.name)
                assert getattr(part, field.name).dtype == value.dtype
    assert one.vision.frame_bound == other.vision.frame_bound


def test_no_two_samples_share_a_seed() -> None:
    """SGLang draws by seed and place alone: the samples of a prompt would be one and the same."""
    bodies = [
        body_of(request("a", prompts("text")["text"], n=4, seed=seed, max_new_tokens=4), 4, "text") for seed in (7, 8)
    ]
    sampling = [params for body in bodies for params in body["sampling_params"]]
    seeds = [params["sampling_seed"] for params in sampling]
    assert len(set(seeds)) == 8 and all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert [(p["custom_params"]["seed"], p["custom_params"]["sample"]) for p in sampling] == [
        (seed, sample) for seed in (7, 8) for sample in range(4)
    ]


def test_images_side_by_side_need_a_token_between() -> None:
    """Else a server would take them for one, of another shape."""
    prompt = prompts("vl")["images"]
    config = model("vl").config
    assert isinstance(config, Qwen25VLConfig)
    inside = (prompt.token_ids_T != config.vision_start_token_id) & (prompt.token_ids_T != config.vision_end_token_id)
    text = (prompt.feature_index_T < 0) & inside
    kept = np.flatnonzero(prompt.feature_index_T >= 0)
    joined = dataclasses.replace(
        prompt,
        token_ids_T=prompt.token_ids_T[np.concatenate([kept, np.flatnonzero(text)])],
        positions_3T=prompt.positions_3T[:, np.concatenate([kept, np.flatnonzero(text)])],
        feature_index_T=prompt.feature_index_T[np.concatenate([kept, np.flatnonzero(text)])],
    )
    with pytest.raises(EngineError, match="need a token between them"):
        body_of(request("a", joined, max_new_tokens=4))
