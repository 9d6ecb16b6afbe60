"""The speed at which an engine prefills and decodes, by tensor-parallel degree, batch and length, from a file.

`python benchmarks/engine_profile.py` writes the file, which is JSON: `{"version": 1, "device": "cpu", "devices": 4,
"model": {"num_layers": 2}, "points": [{"degree": 1, "batch": 8, "length": 64, "prefill": 5000.0, "decode": 800.0}]}`,
with more sizes of the model and more points. Rates are the tokens of one engine in a second.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from models.config import TextConfig

VERSION = 1


class ProfileError(ValueError):
    """A profile can't be read, or has no suitable measurement."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Median rates of one engine on `degree` devices with `batch` samples at once, in tokens a second: `prefill` of
    prompts of `length` tokens, and `decode` of the tokens behind them."""

    degree: int
    batch: int
    length: int
    prefill: float
    decode: float


@dataclasses.dataclass(frozen=True)
class Profile:
    device: str  # kind of the devices
    devices: int  # number of devices of the machine
    model: Mapping[str, int]  # sizes of the model's text part
    points: tuple[Point, ...]

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Profile":
        """Reads a file. Raises ProfileError if it is missing, is no JSON, or has another version or too few fields."""
        try:
            read = json.loads(pathlib.Path(path).read_text())
            if read["version"] != VERSION:
                raise ValueError(f"its version is {read['version']}")
            names = [field.name for field in dataclasses.fields(Point)]
            points = tuple(Point(*(fields[name] for name in names)) for fields in read["points"])
            if wrong := [point for point in points if not min(dataclasses.astuple(point)) > 0]:
                raise ValueError(f"all numbers of {wrong[0]} must be positive")
            if not points:
                raise ValueError("it has no points")
            return Profile(str(read["device"]), int(read["devices"]), dict(read["model"]), points)
        except OSError as error:
            raise ProfileError(f"{path} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError) as error:
            wrong = f"{type(error).__name__}: {error}"
            raise ProfileError(f"{path} is no profile of version {VERSION}: {wrong}") from error

    def best_degree(self, batch: int, length: int, devices: int) -> int:
        """The degree (the smallest of equally fast ones) at which the engines on `devices` devices together decode the
        most tokens a second, if they divide `batch` samples of about `length` tokens between them. Rates are those of
        the nearest length, interpolated between batches on a logarithmic scale. Raises ProfileError if no degree up to
        `devices` was measured."""
        rates = {}
        for degree in sorted({point.degree for point in self.points if point.degree <= devices}):
            engines = devices // degree
            rates[degree] = engines * self._decode(degree, max(batch / engines, 1.0), length)
        if not rates:
            raise ProfileError(f"nothing was measured on {devices} devices or fewer")
        return max(rates, key=lambda degree: (rates[degree], -degree))

    def _decode(self, degree: int, batch: float, length: int) -> float:
        points = [point for point in self.points if point.degree == degree]
        nearest = min({point.length for point in points}, key=lambda measured: abs(math.log(measured / max(length, 1))))
        known = sorted((math.log(point.batch), point.decode) for point in points if point.length == nearest)
        return float(np.interp(math.log(batch), [at for at, _ in known], [rate for _, rate in known]))


def sizes(text: TextConfig) -> dict[str, int]:
    """The sizes by which a profile identifies a model."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(text, name) for name in names}
