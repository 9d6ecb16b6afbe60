"""The prompts that server and trainer get: text, images, boxes and a video."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from models.parity import Probe
from models.processing import MediaError, Processor, PromptError

from ..tasks.pans import PansRecipe, encode
from .findings import Finding, unknown

BOX = " [14, 28, 83, 55] <|box_start|>(14,28),(83,55)<|box_end|>"
SIZE = (180, 120)  # pixels of a picture, whose sides no patch divides


def probes(
    processor: Processor, text: str, images: Sequence[str] = (), videos: Sequence[str] = ()
) -> tuple[dict[str, Probe], list[Finding]]:
    """Returns probes by name, and findings that say which can't be asked of this checkpoint. `images` and `videos` are
    further files. Raises PromptError for a text that the vocabulary lacks, and OSError for a file."""
    picture, clip = picture_file(0), clip_file()
    wanted: dict[str, tuple[str, list[tuple[str, bytes]]]] = {"image": (text, [("image", picture)])}
    wanted["boxes"] = (text + BOX, [("image", picture), ("image", picture_file(1))])
    wanted["video"] = (text, [("video", clip)])
    for kind, files in (("image", images), ("video", videos)):
        wanted |= {file: (text, [(kind, pathlib.Path(file).read_bytes())]) for file in files}
    found, refused = {"text": Probe(processor, text, [])}, []
    for name, (words, media) in wanted.items():
        try:
            found[name] = Probe(processor, words, media)
        except (PromptError, MediaError) as error:
            refused.append(unknown(name, error))
    return found, refused


def picture_file(turns: int) -> bytes:
    """A PNG file whose colours differ and which no symmetry leaves as it is."""
    ramp = Image.linear_gradient("L").rotate(90 * turns)
    colours = [ramp, ramp.rotate(90), Image.radial_gradient("L").transform(ramp.size, Image.Transform.AFFINE,
                                                                           (1, 0, 40, 0, 1, 70))]  # fmt: skip
    Image.merge("RGB", colours).resize(SIZE).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def clip_file() -> bytes:
    """An MP4 file of a second, in which a picture moves to the side."""
    pixels = np.asarray(Image.open(io.BytesIO(picture_file(0))).resize((128, 96)))
    return encode(np.stack([np.roll(pixels, 6 * frame, axis=1) for frame in range(8)]), PansRecipe())
