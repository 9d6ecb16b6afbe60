"""Measures how fast an engine prefills and decodes, by tensor-parallel degree, batch and length; kept as a file.

The file is JSON: `{"version": 1, "device": "cpu", "devices": 4, "model": {"num_layers": 2, ...}, "points": [{"degree":
1, "batch": 8, "length": 64, "prefill": 5000.0, "decode": 800.0}, ...]}`, rates in tokens a second of one engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import numpy as np

from models.config import JsonObject, TextConfig
from models.inputs import ModelInput
from sharding.mesh import Device

from .engine import Engine, GenerateRequest, SamplingParams, TokenChunk

VERSION = 1


class ProfileError(ValueError):
    """A profile that can't be read, or has nothing to say. The message names the file."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One engine on `degree` devices with `batch` samples at once: `prefill` of prompts of `length` tokens, and
    `decode` of what follows them, in tokens a second (the median of what was measured)."""

    degree: int
    batch: int
    length: int
    prefill: float
    decode: float


@dataclasses.dataclass(frozen=True)
class Profile:
    device: str  # kind of the devices
    devices: int  # that there were
    model: Mapping[str, int]  # sizes of its text part
    points: tuple[Point, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        text = json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)
        pathlib.Path(path).write_text(text + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Reads a file. Raises ProfileError if it is missing, no JSON, of another version, or lacks a field."""
        try:
            read = json.loads(pathlib.Path(path).read_text())
        except OSError as error:
            raise ProfileError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ProfileError(f"{path} is not JSON: {error}") from error
        version = read.get("version") if isinstance(read, dict) else None
        if version != VERSION:
            raise ProfileError(f"{path} is no profile of version {VERSION} (its version: {version})")
        try:
            points = tuple(_point(fields) for fields in read["points"])
            profile = Profile(str(read["device"]), int(read["devices"]), dict(read["model"]), points)
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if not points:
            raise ProfileError(f"{path} has no points")
        return profile

    def best_degree(self, batch: int, length: int, devices: int) -> int:
        """The degree at which engines on so many devices decode most tokens a second in all, `batch` samples of about
        `length` tokens divided between them; the smaller one of equals.

        Rates between measured batches are interpolated on a logarithmic scale; the nearest measured length counts.
        Raises ProfileError if nothing was measured at a degree that fits.
        """
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
    """The sizes of a model by which a profile knows it."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(text, name) for name in names}


def _point(read: JsonObject) -> Point:
    point = Point(
        int(read["degree"]), int(read["batch"]), int(read["length"]), float(read["prefill"]), float(read["decode"])
    )
    if not min(dataclasses.astuple(point)) > 0:
        raise ValueError(f"{point} must be positive throughout")
    return point


async def measure(
    engine: Engine,
    devices: Sequence[Device],
    *,
    degrees: Sequence[int],
    batches: Sequence[int],
    lengths: Sequence[int],
    new_tokens: int = 16,
    repeats: int = 5,
    vocabulary: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Point, ...]:
    """Measures an engine that nobody else uses, on the first 1, 2, 4, ... of `devices`, and leaves it on the last.

    Each point is tried once for compilation, then `repeats` times in turn with all others, so that a busy machine
    spoils no point alone. The engine needs slots for the largest batch and room for the largest length and
    `new_tokens` (at least 2). `progress` hears of samples done and in all. Raises EngineError as the engine does.
    """
    cases = [(degree, batch, length) for degree in degrees for batch in batches for length in lengths]
    seconds: dict[tuple[int, int, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for turn in range(repeats + 1):
        for number, case in enumerate(cases):
            degree, batch, length = case
            await engine.set_parallelism(devices[:degree])
            measured = await _once(engine, batch, length, new_tokens, vocabulary)
            if turn:
                seconds[case].append(measured)
            progress(turn * len(cases) + number + 1, (repeats + 1) * len(cases))
    points = []
    for degree, batch, length in cases:
        prefill, decode = (statistics.median(phase) for phase in zip(*seconds[degree, batch, length], strict=True))
        points.append(Point(degree, batch, length, batch * length / prefill, batch * (new_tokens - 1) / decode))
    return tuple(points)


async def _once(engine: Engine, batch: int, length: int, new_tokens: int, vocabulary: int) -> tuple[float, float]:
    """Seconds until all samples have their first token, and from there to the end."""
    rng = np.random.default_rng(0)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length))
    first = [0.0] * batch

    async def read(number: int, stream: AsyncIterator[TokenChunk]) -> None:
        async for _ in stream:
            first[number] = first[number] or time.perf_counter()

    await engine.pause()
    streams = []
    for number in range(batch):
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        prompt = ModelInput(ids, positions, np.full(length, -1, np.int32), length)
        sampling = SamplingParams(max_new_tokens=new_tokens)
        streams.append(engine.generate(GenerateRequest(f"profile.{number:06d}", prompt, sampling, seed=number)))
    begin = time.perf_counter()
    await engine.resume()
    await asyncio.gather(*(read(number, stream) for number, stream in enumerate(streams)))
    end, started = time.perf_counter(), max(first)
    return started - begin, max(end - started, 1e-9)
