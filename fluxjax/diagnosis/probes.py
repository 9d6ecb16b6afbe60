"""The prompts that server and trainer get, and the requests that a faulty server would compute in their place."""

from __future__ import annotations

import dataclasses
import io
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from models.inputs import ModelInput
from models.parity import Probe
from models.processing import MediaError, Processor, PromptError
from models.processing.settings import CLIP_MEAN, CLIP_STD
from rollout.engine import GenerateRequest

from ..tasks.pans import PansRecipe, encode
from . import Finding

Suspect: TypeAlias = tuple[str, str, GenerateRequest]  # the part that would differ, the fault, the faulty request
BOX = " [14, 28, 83, 55] <|box_start|>(14,28),(83,55)<|box_end|>"
SIZE = (180, 120)  # pixels of a picture, whose sides no patch divides
NORMALISATIONS: dict[str, tuple[Any, Any]] = {  # mean and deviation
    "from 0 to 1, without mean and deviation": (0.0, 1.0),
    "by mean and deviation 0.5": (0.5, 0.5),
    "by CLIP's mean and deviation": (CLIP_MEAN, CLIP_STD),
}


def probes(
    processor: Processor, text: str, images: Sequence[str], videos: Sequence[str]
) -> tuple[dict[str, Probe], list[Finding]]:
    """Returns probes by name, and findings that say which can't be asked of this checkpoint. `images` and `videos` are
    further files. Raises PromptError for a text that the vocabulary lacks, and OSError for a file."""
    image, video = [("image", picture_file())], [("video", clip_file())]
    media = {"image": image, "boxes": [*image, ("image", picture_file(turns=1))], "video": video}
    media |= {file: [("image", pathlib.Path(file).read_bytes())] for file in images}
    media |= {file: [("video", pathlib.Path(file).read_bytes())] for file in videos}
    found, refused = {"text": Probe(processor, text, [])}, []
    for name, files in media.items():
        try:
            found[name] = Probe(processor, text + BOX * (name == "boxes"), files)
        except (PromptError, MediaError) as error:
            refused.append(Finding(name, str(error), asked=False))
    return found, refused


def picture_file(turns: int = 0) -> bytes:
    """A PNG file whose colours differ; each number of turns gives another picture."""
    ramp = Image.linear_gradient("L").rotate(90 * turns)
    picture = Image.merge("RGB", [ramp, ramp.rotate(90), ramp.rotate(180)])
    picture.resize(SIZE).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def clip_file() -> bytes:
    """An MP4 file of a second, in which a picture moves to the side."""
    pixels = np.asarray(Image.open(io.BytesIO(picture_file())).resize((128, 96)))
    return encode(np.stack([np.roll(pixels, 6 * frame, axis=1) for frame in range(8)]), PansRecipe())


# --- faults ---------------------------------------------------------------------------------------


def blind(inputs: ModelInput) -> ModelInput:
    """The prompt whose placeholders are ordinary tokens."""
    return dataclasses.replace(inputs, vision=None, feature_index_T=np.full_like(inputs.feature_index_T, -1))


def suspects(processor: Processor, probe: Probe, request: GenerateRequest) -> Iterator[Suspect]:
    """Yields the suspects for the request of a probe whose media are all of one kind; none for a probe of text."""
    inputs, vision = probe.inputs, probe.inputs.vision
    if vision is None:
        return
    yield "pixels", "it computes without the media", dataclasses.replace(request, prompt=blind(inputs))
    settings = processor.video if probe.media[0][0] == "video" else processor.image
    shown_P3V = np.asarray(vision.patches_PX).reshape(vision.num_patches, 3, -1)
    pixels_P3V = shown_P3V * np.reshape(settings.std, (3, 1)) + np.reshape(settings.mean, (3, 1))  # from 0 to 1
    faulty = {"blue, green, red": shown_P3V[:, ::-1]}
    for fault, (mean, std) in NORMALISATIONS.items():
        faulty[fault] = (pixels_P3V - np.reshape(mean, (-1, 1))) / np.reshape(std, (-1, 1))
    for fault, patches_P3V in faulty.items():
        patches_PX = np.ascontiguousarray(patches_P3V, np.float32).reshape(vision.patches_PX.shape)
        prompt = dataclasses.replace(inputs, vision=dataclasses.replace(vision, patches_PX=patches_PX))
        yield "pixels", f"its pixels are {fault}", dataclasses.replace(request, prompt=prompt)
    for (axes, fault), positions_3T in _misplaced(inputs).items():
        following = int(positions_3T[0, -1]) + 1  # a text ends the prompt
        prompt = dataclasses.replace(inputs, positions_3T=positions_3T.astype(np.int32), next_position=following)
        yield f"positions ({axes})", fault, dataclasses.replace(request, prompt=prompt)


def _misplaced(inputs: ModelInput) -> dict[tuple[str, str], np.ndarray]:
    """Faulty positions `[3, T]`, by (axes, fault)."""
    positions_3T, shown_T = inputs.positions_3T, inputs.feature_index_T >= 0
    found = {
        ("all axes", "it counts tokens on all axes, as for text"): np.tile(np.arange(len(inputs)), (3, 1)),
        ("height and width", "they are dropped: both are those of time"): positions_3T[[0, 0, 0]],
        ("height and width", "they are exchanged"): positions_3T[[0, 2, 1]],
    }
    for axis, name in enumerate(("time", "height", "width")):
        for by in (1, -1):
            shifted_3T = positions_3T.copy()
            shifted_3T[axis] += by * shown_T
            found[name, f"those of the media are shifted by {by:+d}"] = shifted_3T
    return found
