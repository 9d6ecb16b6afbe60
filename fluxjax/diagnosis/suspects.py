"""The inputs that a faulty server may compute on: the suspects when its log-probs of a prompt are not the trainer's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from models.inputs import ModelInput
from models.parity import Probe
from models.processing import Processor

SEND = "give the server the trainer's patches and positions (rollout.serve, or SGLang with rollout/sglang_plugin)"
NORMALISATIONS = {
    "from 0 to 1, without mean and deviation": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "from 0 to 255": ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
    "by mean and deviation 0.5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "by ImageNet's mean and deviation": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "by CLIP's mean and deviation": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
AXES = ("time", "height", "width")


class Suspect(NamedTuple):
    """The part that would differ, the fault of the server, what to do about it, and the server's inputs."""

    name: str
    fault: str
    fix: str
    inputs: ModelInput


def blind(inputs: ModelInput) -> ModelInput:
    """The prompt whose placeholders are ordinary tokens."""
    return dataclasses.replace(inputs, vision=None, feature_index_T=np.full_like(inputs.feature_index_T, -1))


def suspects(processor: Processor, probe: Probe) -> Iterator[Suspect]:
    """Yields the suspects for a prompt whose media are all of one kind; none for a prompt of text."""
    inputs = probe.inputs
    if inputs.vision is None:
        return
    wire = "the request lost its media on the way: look at the body that reaches the server"
    yield Suspect("pixels", "it computes without the media", wire, blind(inputs))
    kind, _ = probe.media[0]
    settings = processor.video if kind == "video" else processor.image
    files = f"bring preprocessor_config.json of the server's folder to the trainer's; or {SEND}"
    shown_P3V = np.asarray(inputs.vision.patches_PX).reshape(inputs.vision.num_patches, 3, -1)
    pixels_P3V = shown_P3V * _column(settings.std) + _column(settings.mean)  # from 0 to 1
    for words, (mean, std) in NORMALISATIONS.items():
        if not np.allclose((mean, std), (settings.mean, settings.std), rtol=1e-3):
            yield Suspect("pixels", f"its pixels are {words}", files,
                          _showing(inputs, (pixels_P3V - _column(mean)) / _column(std)))  # fmt: skip
    yield Suspect("pixels", "its pixels are blue, green, red", files, _showing(inputs, shown_P3V[:, ::-1]))
    yield from _misplaced(inputs)


def _column(values: tuple[float, ...]) -> np.ndarray:
    return np.asarray(values, np.float32)[:, None]


def _showing(inputs: ModelInput, patches_P3V: np.ndarray) -> ModelInput:
    assert inputs.vision is not None
    patches_PX = np.ascontiguousarray(patches_P3V.reshape(len(patches_P3V), -1), np.float32)
    return dataclasses.replace(inputs, vision=dataclasses.replace(inputs.vision, patches_PX=patches_PX))


def _misplaced(inputs: ModelInput) -> Iterator[Suspect]:
    """Yields suspects with other positions on one axis or on all."""
    positions_3T, shown_T, length = inputs.positions_3T, inputs.feature_index_T >= 0, len(inputs)
    fix = f"the server's M-RoPE is at fault (its model code, or its version): {SEND}, or update the server"

    def suspect(part: str, fault: str, changed_3T: np.ndarray, following: int = inputs.next_position) -> Suspect:
        placed = dataclasses.replace(inputs, positions_3T=changed_3T.astype(np.int32), next_position=following)
        return Suspect(f"positions ({part})", fault, fix, placed)

    counted_3T = np.broadcast_to(np.arange(length), (3, length))
    yield suspect("all axes", "it counts tokens on all axes, as for text", counted_3T, length)
    yield suspect("answer", "the answer's positions begin at the number of tokens", positions_3T, length)
    behind_T = np.arange(length) > np.flatnonzero(shown_T)[-1]
    late = positions_3T[:, shown_T].max() - positions_3T[1:, shown_T].max()
    if late:
        moved_3T = positions_3T - late * behind_T
        yield suspect("time", "text behind a video begins behind its height and width, whatever its time", moved_3T)
    swapped_3T = positions_3T[[0, 2, 1]]
    yield suspect("height and width", "the two are exchanged", swapped_3T)
    for axis, name in enumerate(AXES):
        for by in (1, -1):
            shifted_3T = positions_3T.copy()
            shifted_3T[axis, shown_T] += by
            yield suspect(name, f"those of the media are shifted by {by:+d}", shifted_3T)
        if axis:
            dropped_3T = positions_3T.copy()
            dropped_3T[axis] = positions_3T[0]
            yield suspect(name, "they are those of time: the axis is dropped", dropped_3T)
