"""Conversations of several turns: layouts that go on behind a prompt, and observations between delimiters."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from models.inputs import ModelInput
from models.processing import Processor, tiny
from models.processing.media_file import Medium
from models.processing.settings import PatchLayout
from models.shadow import ShadowTensor

SPACED = PatchLayout(patch_size=4, window_size=16, tokens_per_second=2)
TIMED = PatchLayout(patch_size=4, window_size=0, tokens_per_second=1)
ARCHITECTURES = ("qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
VISION = ARCHITECTURES[2:]
TEXTS = ["{}<|>.,:;'_/-=\"\\", "abcdefghijklmnopqrstuvwxyz \n0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ", "äß漢🙂"]


def processor_of(architecture: str, template: str = "") -> Processor:
    layout = None if architecture not in VISION else SPACED if architecture == "qwen2_5_vl" else TIMED
    return dataclasses.replace(tiny.build(TEXTS, layout=layout), architecture=architecture, chat_template=template)


PROCESSORS = {name: processor_of(name) for name in ARCHITECTURES}


def shadow_of(media: list[Medium], values: int = 96) -> ShadowTensor | None:
    patches = sum(math.prod(medium.grid) for medium in media)
    return ShadowTensor.of("pixels", (patches, values), np.float32) if media else None


def laid_out(processor: Processor, text: str, media: list[Medium], start: int = 0) -> ModelInput:
    """The layout of a text with these media, by the code that lays out prompts."""
    ids = processor.tokenise(text, [(medium.kind, "") for medium in media])
    return processor.lay_out(processor.outline_of(ids, media), shadow_of(media), start=start)


# kind, frame pairs, rows, columns, seconds of a pair
sizes = st.tuples(st.sampled_from(["image", "video"]), *[st.integers(1, 4)] * 3, st.floats(0.05, 5.0))
texts = st.text("ab 1", max_size=4)
parts = st.lists(st.tuples(st.lists(st.tuples(texts, sizes), max_size=3), texts), min_size=1, max_size=5)


def medium_of(architecture: str, kind: str, pairs: int, rows: int, columns: int, seconds: float) -> Medium:
    if kind == "image":
        return Medium("image", (1, 2 * rows, 2 * columns))
    times = () if architecture == "qwen2_5_vl" else tuple(round(seconds * pair, 1) for pair in range(pairs))
    return Medium("video", (pairs, 2 * rows, 2 * columns), seconds, times=times)


def part_of(architecture: str, media: list[tuple[str, tuple]], end: str) -> tuple[str, list[Medium]]:
    """A text with a mark for each of its media, and the media."""
    found = [medium_of(architecture, *size) for _, size in media] if architecture in VISION else []
    marks = [f"{text}<{medium.kind}>" for (text, _), medium in zip(media, found, strict=False)]
    return "".join([*marks, end]), found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=third_of(60), deadline=None)
@given(drawn=parts, cut=st.integers(0, 5))
def test_the_layout_of_a_conversation_is_that_of_its_parts(architecture: str, drawn: list, cut: int) -> None:
    """Parts that are laid out one behind the other, the response behind a prompt, and all as one prompt."""
    processor = PROCESSORS[architecture]
    given = [part_of(architecture, *part) for part in drawn]
    laid, features, start = [], [], 0
    for text, media in given:
        laid.append(laid_out(processor, text, media, start))
        start = laid[-1].next_position
        features.append(laid[-1].shown[1])
    media = [medium for _, media in given for medium in media]
    entire = laid_out(processor, "".join(text for text, _ in given), media)
    ids = np.concatenate([part.token_ids_T for part in laid])
    np.testing.assert_array_equal(ids, entire.token_ids_T)
    cut = min(cut, len(laid))  # parts of the prompt
    prompt = sum(len(part) for part in laid[:cut])
    prompt_media = [medium for _, media in given[:cut] for medium in media]
    following = laid[cut - 1].next_position if cut else 0
    response = processor.response_layout(tuple(ids[prompt:].tolist()), media[len(prompt_media) :], start=following)
    positions = [np.empty((3, 0), np.int32), *(part.positions_3T for part in laid[cut:])]
    np.testing.assert_array_equal(response.positions_3T, np.concatenate(positions, axis=1))
    np.testing.assert_array_equal(response.positions_3T, entire.positions_3T[:, prompt:])
    assert response.next_position == entire.next_position == start
    assert response.positions_3T.dtype == response.feature_index_T.dtype == np.int32
    own = entire.feature_index_T[prompt:].copy()
    own[own >= 0] -= sum(len(shown) for shown in features[:cut])
    np.testing.assert_array_equal(response.feature_index_T, own)


@pytest.mark.parametrize("architecture", VISION)
def test_a_response_without_media_goes_straight_on(architecture: str) -> None:
    processor = PROCESSORS[architecture]
    layout = processor.response_layout(processor.encode("abc"), start=7)
    assert layout.positions_3T.tolist() == [[7, 8, 9]] * 3 and layout.next_position == 10
    assert layout.feature_index_T.tolist() == [-1] * 3
    assert processor.response_layout((), start=7).next_position == 7


@pytest.mark.parametrize(
    ("text", "media", "message"),
    [
        ("a<image>", [], r"1 runs of placeholders for 0 parts of media: run 0 at token 2 has the placeholder"),
        ("a", ["image"], r"0 runs of placeholders for 1 parts of media: run 0 has the placeholder None"),
        ("a<image><video>", ["video", "image"], r"2 runs .* run 0 at token 2 has"),
        ("a<image>", ["tall"], r"2 placeholders at token 2 do not match the medium's grid \(1, 8, 2\)"),
    ],
)
def test_placeholders_that_do_not_stand_for_the_media_are_named(text: str, media: list[str], message: str) -> None:
    processor = PROCESSORS["qwen2_5_vl"]
    kinds = {
        "image": Medium("image", (1, 2, 4)),
        "video": Medium("video", (1, 2, 4)),
        "tall": Medium("image", (1, 8, 2)),
    }
    shown = [kinds[mark] for mark in ("image", "video") if f"<{mark}>" in text]
    ids = laid_out(processor, text, shown).token_ids_T
    with pytest.raises(ValueError, match=message):
        processor.response_layout(ids, [kinds[name] for name in media])
    with pytest.raises(ValueError, match="reads text only"):
        PROCESSORS["qwen3"].response_layout(ids, [kinds["image"]])
