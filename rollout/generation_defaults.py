"""Reads how a checkpoint wants to be sampled from `generation_config.json`, with what a caller gives instead.

Values that the file leaves out are off: no top-k, no top-p, temperature 1. Without `do_sample: true` it means greedy.
"""

from __future__ import annotations

import dataclasses
import pathlib

from models.config import JsonObject
from models.folder import read_json

FILE = "generation_config.json"
# Fields that change what is sampled and that the engine doesn't have, with the value that leaves all as it is.
UNKNOWN_TO_ENGINE = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "num_beams": 1,
}


@dataclasses.dataclass(frozen=True)
class HowToSample:
    """The sampling of a checkpoint: `temperature` 0 is greedy, `top_k` 0 is off. `ignored` is one line that names all
    fields that are not applied."""

    temperature: float
    top_p: float
    top_k: int
    ignored: str = ""


def how_to_sample(
    folder: pathlib.Path, temperature: float | None = None, top_p: float | None = None, top_k: int | None = None
) -> HowToSample:
    """The settings of a checkpoint folder, with those that are given in their place.

    Raises ValueError naming the file for values that can't be meant, and for a `top_p` or `top_k` that would do nothing
    because the result is greedy.
    """
    said = read_json(folder / FILE)

    def number(name: str, otherwise: float | int, low: float | int, high: float | int) -> float | int:
        value = said.get(name)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{folder / FILE}: {name} must be a number from {low:g} to {high:g}, not {value!r}")
        return value

    if temperature is None:
        temperature = float(number("temperature", 1.0, 0, 1e6)) if said.get("do_sample") else 0.0
    if temperature == 0:
        for flag, value in (("--top-p", top_p), ("--top-k", top_k)):
            if value is not None:
                raise ValueError(f"{flag} does nothing at temperature 0, which is greedy: give --temperature, too")
        return HowToSample(0.0, 1.0, 0, _ignored(folder, said))
    return HowToSample(
        temperature,
        float(number("top_p", 1.0, 1e-6, 1) if top_p is None else top_p),
        int(number("top_k", 0, 0, 2**31 - 1) if top_k is None else top_k),
        _ignored(folder, said),
    )


def _ignored(folder: pathlib.Path, said: JsonObject) -> str:
    wanted = [f"{name}={said[name]}" for name, off in UNKNOWN_TO_ENGINE.items() if said.get(name) not in (None, off)]
    return f"{folder / FILE}: the engine can't do this, so it is not applied: {', '.join(wanted)}" if wanted else ""
