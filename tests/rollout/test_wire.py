"""What a request is on the wire, and that reading it gives the request back."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict

import numpy as np
import pytest
from protocol_cases import limits, model, prompts
from rollout_cases import request
from shadow_cases import Elsewhere

from models.inputs import ModelInput
from models.shadow import ShadowTensor
from rollout import wire
from rollout.engine import EngineError, GenerateRequest
from rollout.requests import checked

MEDIA = [
    *(("vl", name) for name in ("images", "video", "mixed")),
    pytest.param("qwen3_vl", "mixed", marks=pytest.mark.medium),
]


def body_of(asked: GenerateRequest, samples: int = 1, kind: str = "vl") -> wire.Json:
    asked = checked(asked, dataclasses.replace(limits(kind), shadows=True))
    rids = {sample: f"id-{sample}" for sample in range(samples)}
    return json.loads(json.dumps(wire.request_body(asked, rids, model(kind).config, interval=4)))


def first_media(body: wire.Json) -> dict[str, wire.Json]:
    """The media of the first sample, by their field."""
    return {field: wire.our_media(field, body[field][0][0]) for field in wire.FIELDS if field in body}


def fetched(body: wire.Json, media: dict[str, wire.Json], there: Elsewhere, kind: str = "vl") -> ModelInput:
    """The prompt that a server reads of a body with tickets, once it has its pixels."""
    config = model(kind).config
    back = wire.given_prompt(body["input_ids"][0], 0, media, config)
    assert back.vision is not None and isinstance(back.vision.patches_PX, ShadowTensor)
    pixels = back.vision.patches_PX.materialize(there.fetch)
    return dataclasses.replace(back, vision=dataclasses.replace(back.vision, patches_PX=pixels))


@pytest.mark.parametrize(("kind", "name"), MEDIA)
def test_media_come_back_bit_for_bit(kind: str, name: str) -> None:
    prompt, config = prompts(kind)[name], model(kind).config
    body = body_of(request("a", prompt, n=2, prefix=((20, 21), ()), max_new_tokens=8), samples=2, kind=kind)
    for sample, begun in enumerate((2, 0)):
        media = {}
        for field in wire.FIELDS:
            if field in body:
                first, own = (wire.our_media(field, body[field][place][0]) for place in (0, sample))
                assert own["key"] == first["key"]
                media[field] = {**first, **own}  # patches are with the first sample
        back = wire.given_prompt(body["input_ids"][sample], begun, media, config)
        same(back, prompt)


@pytest.mark.parametrize("kind", ["vl", "qwen3_vl"])
def test_a_body_lacks_the_pixels_that_the_server_has(kind: str) -> None:
    """The server puts them together again, bit for bit, or says which are missing."""
    prompt, config, names = prompts(kind)["mixed"], model(kind).config, set[str]()
    kept = OrderedDict[str, np.ndarray]()
    asked = checked(dataclasses.replace(request("a", prompt, max_new_tokens=8), session="s"), limits(kind))
    size = len(prompt.vision.patches_PX)  # type: ignore[union-attr]

    def back(known: set[str]) -> tuple[int, ModelInput]:
        body = wire.request_body(asked, {0: "r"}, config, interval=1, known=known, names=names)
        media = {field: wire.our_media(field, body[field][0][0]) for field in wire.FIELDS}
        sent = sum(wire.array_of("patches", entry["patches"]).shape[0] for entry in media.values())
        media = {field: {**entry, "patches": wire.completed(field, entry, kept)} for field, entry in media.items()}
        return sent, wire.given_prompt(body["input_ids"][0], 0, media, config)

    sent, first = back(set())
    same(first, prompt)
    assert sent == size and names == kept.keys()
    sent, again = back(set(list(names)[1:]))
    same(again, prompt)
    assert 0 < sent < size
    sent, nothing = back(names)
    same(nothing, prompt)
    assert sent == 0
    kept.popitem()
    with pytest.raises(wire.BadRequest, match=r"pieces: .*send all patches again"):
        back(names)
    for pieces in (3, [["a"]], [["a", -1]], [[{}, 1]], [], "ab", [["a", 1], ["a", 0.5]]):
        entry = {"pieces": pieces, "patches": wire.array_json(np.zeros((4, 2), np.float32))}
        with pytest.raises(wire.BadRequest, match=r"image_data\.pieces"):
            wire.completed("image_data", entry, OrderedDict())


def test_a_server_drops_the_oldest_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "KEPT_BYTES", 3 * 4 * 2 * 4)
    kept = OrderedDict[str, np.ndarray]()
    patches = wire.array_json(np.arange(8, dtype=np.float32).reshape(4, 2))
    for name in "abcad":
        wire.completed("image_data", {"pieces": [[name, 4]], "patches": patches}, kept)
    assert list(kept) == ["c", "a", "d"]


@pytest.mark.medium
def test_frame_pairs_of_a_video_may_be_one_entry() -> None:
    """SGLang takes such an entry, too. The prompt is the same."""
    prompt, config = prompts("qwen3_vl")["video"], model("qwen3_vl").config
    body = body_of(request("a", prompt, max_new_tokens=8), kind="qwen3_vl")
    media = first_media(body)
    grids = wire.array_of("grid_thw", media["video_data"]["grid_thw"])
    assert len(grids) > 1 and (grids == [1, *grids[0, 1:]]).all()
    joined = np.asarray([[len(grids), *grids[0, 1:]]], np.int32)
    media["video_data"]["grid_thw"] = wire.array_json(joined)
    same(wire.given_prompt(body["input_ids"][0], 0, media, config), prompt)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("kind", "name"), MEDIA)
def test_tickets_come_back_in_the_place_of_patches(kind: str, name: str, parts: int) -> None:
    """Exactly: who fetches them has the very prompt."""
    prompt, there = prompts(kind)[name], Elsewhere()
    assert prompt.vision is not None
    shadow = there.shadow(prompt, "m", parts)
    body = body_of(request("a", shadow, n=2, max_new_tokens=8), samples=2, kind=kind)
    media = first_media(body)
    assert len(json.dumps(media)) < prompt.vision.patches_PX.nbytes / 4, "no pixels"
    same(fetched(body, media, there, kind), prompt)
    for other in (there.shadow(prompt, "other", parts), there.shadow(prompt, "m", parts)):
        theirs = first_media(body_of(request("a", other, max_new_tokens=8), kind=kind))
        alike = [entry["key"] for entry in theirs.values()] == [entry["key"] for entry in media.values()]
        assert alike == ("other" not in str(other.vision.patches_PX))  # type: ignore[union-attr]


def test_what_is_here_travels_beside_tickets() -> None:
    prompt, there = prompts("vl")["mixed"], Elsewhere()
    assert prompt.vision is not None
    patches_PX = np.concatenate([there.shadow(prompt, "m").vision.patches_PX[:8], prompt.vision.patches_PX[8:]])  # type: ignore
    mixed = dataclasses.replace(prompt, vision=dataclasses.replace(prompt.vision, patches_PX=patches_PX))
    body = body_of(request("a", mixed, max_new_tokens=8))
    same(fetched(body, first_media(body), there), prompt)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rows": [["t", 0, 4]]}, "there are 4 rows, but the shape says"),
        ({"rows": [["t", 4, 4]]}, "is no .ticket, start, stop"),
        ({"rows": [["t", -1, 4]]}, "is no .ticket, start, stop"),
        ({"rows": [["t", 0, True]]}, "is no .ticket, start, stop"),
        ({"rows": [[7, 0, 4]]}, "is no .ticket, start, stop"),
        ({"rows": [["t", 0]]}, "patches.shadow"),
        ({"rows": 3}, "patches.shadow"),
        ({"rows": [{"dtype": "float32"}]}, "patches"),
        ({"rows": [wire.array_json(np.zeros((4, 3), np.float32))]}, "an array among the rows"),
        ({"dtype": "int32"}, "must be float32"),
        ({"shape": [16]}, "must be float32"),
        ({"shape": [-4, 96]}, "must be float32"),
        ({"shape": None}, "patches.shadow"),
    ],
    ids=str,
)
def test_tickets_that_make_no_sense_are_refused(change: wire.Json, complaint: str) -> None:
    good = wire.shadow_json(ShadowTensor.of("t", (16, 96), np.float32))
    assert wire.patches_of("image_data.patches", good) == ShadowTensor.of("t", (16, 96), np.float32)
    with pytest.raises(wire.BadRequest, match=f"image_data.patches.*{complaint}|{complaint}"):
        wire.patches_of("image_data.patches", {wire.SHADOW: {**good[wire.SHADOW], **change}})


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
    inside = (prompt.token_ids_T != config.vision_start_token_id) & (prompt.token_ids_T != config.vision_end_token_id)
    kept, text = np.flatnonzero(prompt.feature_index_T >= 0), np.flatnonzero((prompt.feature_index_T < 0) & inside)
    order = np.concatenate([kept, text])
    places = {name: getattr(prompt, name)[..., order] for name in ("token_ids_T", "positions_3T", "feature_index_T")}
    joined = dataclasses.replace(prompt, **places)
    with pytest.raises(EngineError, match="need a token between them"):
        body_of(request("a", joined, max_new_tokens=4))
