"""Gymnasium environments with discrete actions: the model sees rendered images, and plays by the names of actions."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import re
from typing import Any

from PIL import Image

from ..base.errors import ConfigError
from ..base.import_path import imported
from ..base.scored import Prompt
from ..config.bounds import check_fields, not_negative, positive
from .observation import Observation, as_json

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame then renders without a screen


@dataclasses.dataclass(eq=False)
class Gymnasium:
    """Plays the environment `id`. The names of actions in a turn, behind its reasoning and in any case, are carried out
    in order. If the answer of a prompt is a JSON object, it has further arguments of `gymnasium.make`, such as
    {"desc": ["SF", "HG"]}. If observations are dictionaries, the first one's texts, such as MiniGrid's mission, are
    shown. Raises `ConfigError` for a wrong setting."""

    id: str = "FrozenLake-v1"
    # The names of the actions 0, 1, ...; the model can't choose actions behind the last name.
    actions: list[str] = dataclasses.field(default_factory=lambda: ["left", "down", "right", "up"])
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `gymnasium.make`
    imports: list[str] = dataclasses.field(default_factory=list)  # modules that register environments
    moves: int = positive(1)  # actions of a turn that are carried out
    max_turns: int = positive(100)  # after which the episode is done
    image: bool = True  # False: the observation as text, without an image
    pixels: int = not_negative(0)  # height and width of images; 0: as they are rendered
    invalid_reward: float = 0.0  # of a turn without an action
    demonstration: str = ""  # import path of a function: (unwrapped environment) -> a good action's number, or a turn

    def __post_init__(self) -> None:
        check_fields(self, "environment gymnasium: ")
        names = sorted(self.actions, key=len, reverse=True)  # "go up" before "go"
        if not names or len({name.casefold() for name in names} - {""}) < len(names):
            raise ConfigError(f"environment gymnasium: actions is {self.actions}; it must have different names")
        words = "|".join(f"({re.escape(name)})" for name in names)
        self._words = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)
        self._numbers = [0, *(self.actions.index(name) for name in names)]  # by the group of a match
        self._game: Any = None

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        try:
            gymnasium, *_ = [importlib.import_module(name) for name in ("gymnasium", *self.imports)]
        except ImportError as error:
            fix = "pip install 'fluxjax[environments]', and the packages of imports"
            raise ConfigError(f"environment gymnasium: {error}; {fix}") from None
        settings = {"disable_env_checker": True, **self.arguments}
        with contextlib.suppress(ValueError):
            settings |= record if isinstance(record := json.loads(prompt.answer), dict) else {}
        try:
            self._game = gymnasium.make(self.id, **settings | ({"render_mode": "rgb_array"} if self.image else {}))
        except gymnasium.error.UnregisteredEnv as error:
            raise ConfigError(f"environment gymnasium: id is {self.id!r}: {error}") from None
        space, count = self._game.action_space, len(self.actions)
        if not isinstance(space, gymnasium.spaces.Discrete) or space.n < count:
            text = f"the action space of {self.id} must be Discrete with as many, but is {space}"
            raise ConfigError(f"environment gymnasium: actions has {count} names; {text}")
        self._first, self._turns = int(space.start), 0
        seen, _ = self._game.reset(seed=seed % (1 << 31))  # some environments refuse larger seeds
        texts = [f"{k}: {v}" for k, v in seen.items() if isinstance(v, str)] if isinstance(seen, dict) else []
        return Observation("\n".join(texts) if self.image else as_json(seen), self._images())

    def step(self, text: str) -> Observation:
        self._turns += 1
        found = itertools.islice(self._words.finditer(text.split("</think>", 1)[-1]), self.moves)
        said = f"No action was found. The actions are: {', '.join(self.actions)}."
        reward, over, names = self.invalid_reward, False, list[str]()
        for number in [self._numbers[match.lastindex or 0] for match in found]:
            if not over:
                seen, gained, terminated, truncated, _ = self._game.step(self._first + number)
                reward, over = float(gained) + (reward if names else 0.0), bool(terminated or truncated)
                names.append(self.actions[number])
                said = "" if self.image else as_json(seen)
        done = over or self._turns >= self.max_turns
        images = self._images() if names and not done else []  # nobody sees an image behind the last turn
        return Observation(said, images, reward=reward, done=done, info={"actions": names})

    def demonstrate(self) -> str:
        """Returns the name of a good action, or a turn's text. Raises `ConfigError` without a `demonstration`."""
        function = imported(self.demonstration, "environment gymnasium: demonstration", callable)
        good = function(self._game.unwrapped)
        return good if isinstance(good, str) else self.actions[int(good)]

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _images(self) -> list[Image.Image]:
        image = Image.fromarray(self._game.render()) if self.image else None
        return [image.resize((self.pixels, self.pixels)) if self.pixels else image] if image else []
