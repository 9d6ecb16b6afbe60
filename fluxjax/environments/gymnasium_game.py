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
from .observation import Observation, spoken

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame then renders without a screen


@dataclasses.dataclass(eq=False)
class Gymnasium:
    """Plays the environment `id` of Gymnasium, or of a package that registers environments there. The names of actions
    in a turn, behind its reasoning and in any case, are carried out in order until the environment ends. If the answer
    of a prompt is a JSON object, it has further arguments of `gymnasium.make`, such as {"desc": ["SF", "HG"]}. Texts in
    an observation that is a dictionary, such as MiniGrid's mission, are shown when they change. Raises `ConfigError`
    for a wrong setting."""

    id: str = "FrozenLake-v1"
    # The names of the actions 0, 1, ...; the model can't choose actions behind the last name.
    actions: list[str] = dataclasses.field(default_factory=lambda: ["left", "down", "right", "up"])
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `gymnasium.make`
    imports: list[str] = dataclasses.field(default_factory=list)  # modules that register environments
    moves: int = positive(1)  # actions of a turn that are carried out; further ones are not
    max_turns: int = positive(100)  # after which the episode is done
    image: bool = True  # False: the observation as text instead of an image
    pixels: int = not_negative(0)  # height and width of images; 0: as they are rendered
    invalid_reward: float = 0.0  # of a turn without an action
    demonstration: str = ""  # import path of a function: (unwrapped environment) -> number of a good action

    def __post_init__(self) -> None:
        check_fields(self, "environment gymnasium: ")
        self.actions = [str(name) for name in self.actions]
        names = [name.casefold() for name in self.actions]
        if not names or not all(names) or len(names) != len(set(names)):
            raise ConfigError(f"environment gymnasium: actions is {self.actions}; it must have different names")
        try:
            for module in ("gymnasium", *self.imports):
                importlib.import_module(module)
        except ImportError as error:
            fix = "pip install 'fluxjax[environments]', and the packages of imports"
            raise ConfigError(f"environment gymnasium: {error}; {fix}") from None
        self._order = sorted(range(len(names)), key=lambda number: -len(names[number]))  # "go up" before "go"
        words = "|".join(f"({re.escape(self.actions[number])})" for number in self._order)
        self._words = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)
        self._game: Any = None

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self._given, self._seed = {}, seed % (1 << 31)  # some environments refuse larger seeds
        with contextlib.suppress(ValueError):
            self._given = given if isinstance(given := json.loads(prompt.answer), dict) else {}
        self._begin()
        return self._observation()

    def step(self, text: str) -> Observation:
        self._turns += 1
        found = (self._order[(match.lastindex or 1) - 1] for match in self._words.finditer(spoken(text)))
        if not (actions := list(itertools.islice(found, self.moves))):
            said = f"No action was found. The actions are: {', '.join(self.actions)}."
            done = self._turns >= self.max_turns
            return Observation(said, reward=self.invalid_reward, done=done, info={"actions": []})
        before = len(self._played)
        reward = sum(self._act(action) for action in actions if not self._over)
        return self._observation(reward, {"actions": [self.actions[action] for action in self._played[before:]]})

    def demonstrate(self) -> str:
        """Returns the name of a good action. Raises `ConfigError` without a `demonstration`."""
        if not self.demonstration:
            raise ConfigError("environment gymnasium: demonstration is empty; a warm start needs a function that plays")
        function = imported(self.demonstration, "environment gymnasium: demonstration", callable)
        return self.actions[int(function(self._game.unwrapped))]

    def snapshot(self) -> bytes:
        return json.dumps([self._turns, self._played, self._shown]).encode()

    def restore(self, snapshot: bytes) -> None:
        """Plays the recorded actions again."""
        turns, actions, shown = json.loads(snapshot)
        self._begin()
        for action in actions:
            self._act(action)
        self._turns, self._shown = turns, shown

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _begin(self) -> None:
        import gymnasium

        self.close()
        settings: dict[str, Any] = {"disable_env_checker": True, **self.arguments, **self._given}
        settings |= {"render_mode": "rgb_array"} if self.image else {}
        try:
            gymnasium.spec(self.id)
        except gymnasium.error.Error as error:
            raise ConfigError(f"environment gymnasium: id is {self.id!r}: {error}") from None
        self._game = gymnasium.make(self.id, **settings)
        space = self._game.action_space
        if not isinstance(space, gymnasium.spaces.Discrete) or space.n < len(self.actions):
            raise ConfigError(
                f"environment gymnasium: actions has {len(self.actions)} names, but {self.id} has the action space "
                f"{space}; a Discrete space with as many actions is needed"
            )
        self._first, self._turns, self._over, self._shown = int(space.start), 0, False, ""
        self._played: list[int] = []
        self._seen, _ = self._game.reset(seed=self._seed)

    def _act(self, action: int) -> float:
        self._played.append(action)
        self._seen, reward, terminated, truncated, _ = self._game.step(self._first + action)
        self._over = bool(terminated or truncated)
        return float(reward)

    def _observation(self, reward: float = 0.0, info: dict[str, Any] | None = None) -> Observation:
        done, images, text = self._over or self._turns >= self.max_turns, [], self._text()
        if self.image and not done:  # nobody sees an image behind the last turn
            image = Image.fromarray(self._game.render())
            images = [image.resize((self.pixels, self.pixels)) if self.pixels else image]
        return Observation(text, images, reward=reward, done=done, info=info or {})

    def _text(self) -> str:
        if not self.image:
            return json.dumps(self._seen, default=lambda value: getattr(value, "tolist", value.__str__)())
        texts = self._seen.items() if isinstance(self._seen, dict) else ()
        before, self._shown = self._shown, "\n".join(f"{name}: {text}" for name, text in texts if isinstance(text, str))
        return self._shown if self._shown != before else ""
