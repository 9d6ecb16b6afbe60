"""The protocol of environments: what they take and return, their bounds, and the ways in which they can fail."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from ..base.scored import Prompt

if TYPE_CHECKING:
    from PIL import Image

# Pixels `[height, width]` or `[height, width, channels]` (uint8; 1, 3 or 4 channels), or an encoded file's content.
Picture: TypeAlias = "Image.Image | np.ndarray | bytes"
# Frames of one size, `[frames, height, width, 3]` (uint8) or one by one, or an encoded file's content.
Video: TypeAlias = "np.ndarray | Sequence[Image.Image | np.ndarray] | bytes"


@dataclasses.dataclass
class Observation:
    """An environment's answer to a turn of the model. `text` has an `<image>` or `<video>` mark for each medium, in
    order; a text without marks gets all marks at its beginning. `reward` is of this turn. `done` ends the episode.
    `info` is for reports, in types of JSON. `fps` is the rate of given frames, in frames a second."""

    text: str = ""
    images: Sequence[Picture] = ()
    videos: Sequence[Video] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fps: float = 2.0


def as_json(value: Any) -> str:
    """Returns a value as JSON: arrays and numbers of NumPy as lists and numbers, all else that JSON lacks as text."""
    return json.dumps(value, default=lambda part: getattr(part, "tolist", part.__str__)(), ensure_ascii=False)


class Environment(Protocol):
    """Plays an episode. Methods may be `async`. An environment may also have `close()`, and both `snapshot() -> bytes`,
    which returns the state of its episode, and `restore(snapshot)`, which sets this state after a `reset` with the same
    prompt and seed, perhaps in another process; and `demonstrate() -> str`, which returns a good next turn. The warm
    start imitates these turns."""

    def reset(self, prompt: Prompt, seed: int) -> Observation | Awaitable[Observation]:
        """Begins an episode and returns what the model sees beside the prompt. All chance must come from `seed`."""
        ...

    def step(self, text: str) -> Observation | Awaitable[Observation]:
        """Answers a turn of the model."""
        ...


class Fault(enum.Enum):
    """The ways in which an environment can fail, as metrics count them."""

    TIMED_OUT = "timed_out"
    RAISED = "raised"
    DIED = "died"  # the process of the environment ended
    MEMORY = "memory"  # the process needed too much memory
    TOO_LARGE = "too_large"  # too much text, or too many or too large media
    MEDIUM = "medium"  # an image or a video that can't be read
    REWARD = "reward"  # no finite number
    INVALID = "invalid"  # an observation of another type


class EnvironmentFailure(Exception):
    """An environment failed, which ended its episode. `reason` is short, so that equal reasons can be counted."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault, self.reason = fault, reason
