"""Environments that show a picture after each turn; one answers in another way each time it is begun, one is slow."""

import dataclasses
import itertools
import json
import time
import zlib

import numpy as np

from fluxjax.environments import Observation
from fluxjax.rewards import Prompt

PICTURES = 2  # at most
begun = itertools.count()


class Painter:
    """Answers with a picture that depends on all turns. Some turns end the episode."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.state, self.turns = seed, 0
        return Observation()

    def step(self, text: str) -> Observation:
        self.state, self.turns = zlib.crc32(text.encode(), self.state), self.turns + 1
        done = self.turns > PICTURES or self.state % 5 == 0
        picture = np.random.default_rng(self.state).integers(0, 256, (28, 28 * (1 + self.state % 2), 3), np.uint8)
        return Observation("see <image> now", [picture], reward=0.25 * self.turns, done=done)


class Fickle(Painter):
    def reset(self, prompt: Prompt, seed: int) -> Observation:
        return super().reset(prompt, seed + next(begun))


class Repainting(Painter):
    """Shows other pictures, of the same size, each time it is begun."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.brush = next(begun)
        return super().reset(prompt, seed)

    def step(self, text: str) -> Observation:
        observation = super().step(text)
        return dataclasses.replace(
            observation, images=[np.asarray(image) // (1 + self.brush) for image in observation.images]
        )


class Unwritable(Fickle):
    """Says what the vocabulary of tests lacks, unless it is the first of its process to begin."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.first = next(begun) == 0
        return Painter.reset(self, prompt, seed)

    def step(self, text: str) -> Observation:
        return Painter.step(self, text) if self.first else Observation("\u6f22")


class Slow(Painter):
    """Appends a line to the file that the prompt names for each turn that it hears."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.file = prompt.text
        return super().reset(prompt, seed)

    def step(self, text: str) -> Observation:
        with open(self.file, "a") as file:
            file.write(f"{text}\n")
        time.sleep(0.3)
        return super().step(text)


class Remembering(Slow):
    def snapshot(self) -> bytes:
        return json.dumps([self.state, self.turns]).encode()

    def restore(self, snapshot: bytes) -> None:
        self.state, self.turns = json.loads(snapshot)
