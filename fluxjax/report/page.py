"""Makes one page of HTML that shows a run's dumped samples, without a server and without the network.

`view.html` beside this file is the page without data. Texts of models and data sets may be hostile: `as_json` escapes
all characters that could end a script, the page's script shows texts as texts, whatever a record has in their place,
and the page's policy allows no other script and no request.
"""

import base64
import dataclasses
import hashlib
import importlib.resources
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
from PIL import Image

from models.config import PatchLayout
from models.processing import MediaError
from models.processing.images import load_image
from models.processing.media_file import opened
from models.processing.processor import PADS
from models.processing.settings import DecodeLimits, FrameSettings, PixelSettings
from models.processing.videos import VideoReader

from ..base.errors import DataError, said
from ..base.medium import Media, MediaKind
from ..base.scored import ENVIRONMENT
from ..data.locations import is_url
from ..data.tickets import source_of
from .metrics import read
from .samples import read_samples, recorded_numbers

SIDE = 224  # pixels of the longer side of a small picture
MOST_PICTURES = 300  # small pictures of a page
_READ_HERE = ("numbers", "pieces", "refs")  # fields of records that the page's script does not get
_FRAMES = FrameSettings(fps=2, min_frames=4, max_frames=4)
_SHORT = DecodeLimits(frames=1000)  # longer videos take too long to decode


@dataclasses.dataclass
class Page:
    """Samples as JSON, until they and their pictures take `most_bytes`; further samples are counted."""

    run_dir: pathlib.Path
    most_bytes: int
    samples: list[str] = dataclasses.field(default_factory=list)
    media: dict[str, str] = dataclasses.field(default_factory=dict)  # JSON by reference
    steps: set[int] = dataclasses.field(default_factory=set)
    size: int = 0  # bytes of samples and media
    pictures: int = 0
    left_out: int = 0
    damaged: int = 0  # lines of files that can't be read

    def add_step(self, step: int) -> None:
        """Adds the samples of a step. Raises OSError if the step's file can't be read."""
        for line, record in enumerate(read_samples(self.run_dir, step)):
            shown = {name: value for name, value in record.items() if name not in _READ_HERE}
            refs = record.get("refs") or [[name] for name in record.get("media", ())]  # older records have only names
            text = as_json(shown | {"step": step, "line": line, "tokens": tokens_of(record), "media": refs})
            if not record:
                self.damaged += 1
            elif self.size + len(text) > self.most_bytes:
                self.left_out += 1
            else:
                self.samples.append(text)
                self.steps.add(step)
                self.size += len(text)
                for ref in [*refs, *chain.from_iterable(record.get("observed", ()))]:
                    self._add_medium(ref)

    def _add_medium(self, ref: Sequence[str]) -> None:
        key, shown, why = "\n".join(ref), "", ""
        if key in self.media:
            return
        try:
            if self.pictures >= MOST_PICTURES or self.size >= self.most_bytes:
                raise MediaError("the page", "has no room for further pictures")
            shown = small_picture(self.run_dir, *ref)
            self.pictures += 1
        except Exception as error:  # decoders raise many types, and a damaged file must not cost the page
            why = said(error)
        self.media[key] = as_json({"picture": shown, "why": why})
        self.size += len(self.media[key])

    @property
    def notes(self) -> list[str]:
        """Sentences about samples that the page lacks."""
        left_out = [f"{self.left_out} samples are left out: --step and --megabytes show others"] * bool(self.left_out)
        return left_out + [f"{self.damaged} lines of samples are damaged"] * bool(self.damaged)

    def html(self) -> str:
        """Returns the page, which is ASCII. The times of steps are those of the run's metrics."""
        records = [r for r in read(self.run_dir / "metrics.jsonl") if r["phase"] == "rl" and r["step"] in self.steps]
        seconds = {r["step"]: {n[8:]: float(r[n]) for n in r if n.startswith("seconds/")} for r in records}
        head = {"run": str(self.run_dir), "notes": self.notes, "seconds": seconds}
        head = as_json(head | {"environment": ENVIRONMENT, "pads": {pad: kind for kind, pad in PADS.items()}})
        media = ",".join(f"{as_json(key)}:{medium}" for key, medium in self.media.items())
        data = f'{head[:-1]},"samples":[{",".join(self.samples)}],"media":{{{media}}}}}'
        page = importlib.resources.files(__package__ or "").joinpath("view.html").read_text(encoding="utf-8")
        script = page.partition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        before, _, behind = page.replace("{{script}}", f"'sha256-{digest}'").partition("{{data}}")
        return before + data + behind


def as_json(value: Any) -> str:
    """Returns JSON in ASCII that cannot end the element of HTML around it. Raises ValueError for NaN and infinity."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def tokens_of(record: Mapping[str, Any]) -> dict[str, Any] | str:
    """Returns the tokens of a response: ids, log-probs, runs of versions, texts; or the reason if there are none."""
    try:
        numbers = recorded_numbers(record)
    except DataError as error:
        return str(error)
    if numbers is None:
        return "the run's release wrote no tokens"
    return {
        "ids": numbers.tokens.tolist(),
        "logprobs": np.round(np.nan_to_num(numbers.logprobs.astype(np.float64)), 4).tolist(),
        "versions": [(version, len(list(run))) for version, run in groupby(numbers.versions.tolist())],
        "texts": record["pieces"],
    }


def small_picture(run_dir: pathlib.Path, kind: str, path: str = "", cell: str = "", stamp: str = "") -> str:
    """Returns a small picture of a medium as a data URI; of a video, up to four frames side by side. Reads no URL.
    Raises MediaError, and other errors of decoders."""
    if not path or is_url(path):
        raise MediaError(path or kind, "is not shown: " + ("it is at a URL" if path else "the samples lack its path"))
    source = source_of(Media(MediaKind(kind), str(run_dir / path), cell=cell, stamp=stamp))
    if kind == MediaKind.IMAGE.value:
        image = load_image(source)
        image.thumbnail((SIDE, SIDE))
    else:
        frames: list[np.ndarray] = []
        with opened(source) as file:
            size = PixelSettings(min_pixels=1, max_pixels=(SIDE // 2) ** 2)
            reader = VideoReader(file, path, PatchLayout(), size, _FRAMES, _SHORT)
            reader.read(lambda number, count, frame: frames.__setitem__(slice(number, None), [frame]))  # may begin anew
        image = Image.fromarray(np.concatenate(frames, axis=1))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=85, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
