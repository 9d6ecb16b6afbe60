"""An environment for runs of tests: the model says the next letter of the alphabet, and the environment the one after
it, with a picture of their number if the prompt asks for pictures."""

import contextlib
import os
import pathlib
import signal
import time
from typing import Any

import numpy as np

from fluxjax.environments import Observation
from fluxjax.rewards import Prompt

LETTERS = "abcdefgh"


class Counting:
    def __init__(
        self,
        turns: int = 3,
        skill: float = 1.0,
        pictures: bool = False,
        trouble: str = "",
        patient: bool = False,
        mood: str = "",
        seconds: float = 0.0,
    ) -> None:
        """A `patient` environment goes on behind a wrong letter. The file `mood` names the method that says something
        else than without this file. A turn takes some `seconds`."""
        self.turns, self.skill, self.pictures, self.trouble = turns, skill, pictures, trouble
        self.patient, self.mood, self.seconds = patient, pathlib.Path(mood), seconds

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.chance, self.said = np.random.default_rng(seed), 0
        self.at = (int(self.chance.integers(len(LETTERS))) + self._moved("reset")) % len(LETTERS)
        return Observation(LETTERS[self.at], self._pictures())

    def step(self, text: str) -> Observation:
        time.sleep(self.seconds)
        if self.trouble and text == self.trouble:
            raise RuntimeError(f"does not like {text}")
        self.said += 1
        right = text == self._next()
        self.at = (self.at + 2 + self._moved("step")) % len(LETTERS)
        reward = float(right) / self.turns if self.said < self.turns or not right else 1.0
        if self.said == self.turns or not (right or self.patient):
            return Observation(reward=reward if right else -1.0, done=True)
        return Observation(LETTERS[self.at], self._pictures(), reward=reward)

    def demonstrate(self) -> str:
        return self._next() if self.chance.random() < self.skill else "h"

    def _moved(self, method: str) -> bool:
        return self.mood.is_file() and self.mood.read_text() == method

    def _next(self) -> str:
        return LETTERS[(self.at + 1) % len(LETTERS)]

    def _pictures(self) -> list[np.ndarray]:
        return [np.full((28, 28 * (1 + self.at % 2), 3), 20 * self.at, np.uint8)] if self.pictures else []


class Mortal(Counting):
    """Fails in a second turn if a file says so: kills its process (`k`) or raises (`r`). One environment finds it."""

    def __init__(self, deaths: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.deaths = pathlib.Path(deaths)

    def step(self, text: str) -> Observation:
        if self.said == 1:
            with contextlib.suppress(FileNotFoundError):
                if self.deaths.rename(self.deaths.with_suffix(f".{os.getpid()}")).read_text() == "r":
                    raise RuntimeError("out of order")
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(text)


class Troubled(Counting):
    """Misbehaves in the first turn in the way that the prompt names."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.how = prompt.text
        return super().reset(prompt, seed)

    def step(self, text: str) -> Observation:
        from environments.hostile import Hostile

        return super().step(text) if self.how == "go on" else Hostile().step(self.how)
