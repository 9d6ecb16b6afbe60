"""Plays an environment in a process of `EnvironmentPool`, and checks each observation before it leaves the process."""

from __future__ import annotations

import asyncio
import inspect
import json
import pathlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sharding.door import ByName

from ..base.errors import ConfigError, DataError
from ..base.finite import finite
from ..base.import_path import imported
from ..config.data import EnvironmentLimits
from .observation import EnvironmentFailure, Fault, Observation
from .observed_media import stored

OPTIONAL = ("snapshot", "restore", "demonstrate")  # methods of an environment
ENVIRONMENTS = ByName(__name__, {"gymnasium": "gymnasium_game:Gymnasium", "tools": "tools:ToolEnvironment"})


def playing_function(settings: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Returns the function by which a process carries out the orders of `LiveEpisode`."""
    return _Player(pathlib.Path(settings["folder"]), EnvironmentLimits(**settings["limits"]))


def build(name: str, arguments: Mapping[str, Any]) -> Any:
    """Returns the environment of a name in `ENVIRONMENTS`, or of an import path (`module:attribute`). A class or a
    function is called with the `arguments`. Raises `ConfigError`, and what the class raises."""
    value = imported(name, "environment", inspect.isclass) if ":" in name else ENVIRONMENTS.get(name)
    if value is None:
        raise ConfigError(f"environment is {name!r}; it must be {', '.join([*ENVIRONMENTS, ''])}or module:attribute")
    if inspect.isclass(value) or not hasattr(value, "step"):
        try:
            inspect.signature(value).bind(**arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"environment is {name!r}, which can't take the arguments {arguments}: {error}") from None
        value = value(**arguments)
    elif arguments:
        raise ConfigError(f"environment is {name!r}, an object, which takes no arguments such as {dict(arguments)}")
    if missing := [method for method in ("reset", "step") if not callable(getattr(value, method, None))]:
        raise ConfigError(f"environment is {name!r}, which has no {' and no '.join(missing)} method")
    return value


class _Player:
    """Plays one episode at a time. Each order names a method."""

    def __init__(self, folder: pathlib.Path, limits: EnvironmentLimits) -> None:
        self._folder, self._limits = folder, limits
        self._environment: Any = None
        self._loop = asyncio.Runner()  # one loop for all calls, because async environments keep connections

    def __call__(self, order: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": getattr(self, order["do"])(*order["with"])}
        except EnvironmentFailure as failure:
            return {"fault": failure.fault.value, "reason": failure.reason}
        except (ConfigError, DataError) as error:
            return {"mend": str(error), "setting": isinstance(error, ConfigError)}

    def start(
        self, environment: str, arguments: Mapping[str, Any], prompt: bytes, seed: int
    ) -> tuple[dict[str, Any], list[str]]:
        """Returns the first observation, and the names of the optional methods that the environment has."""
        self._environment = build(environment, arguments)
        observation = self._observed(self._environment.reset(pickle.loads(prompt), seed))
        return observation, [name for name in OPTIONAL if callable(getattr(self._environment, name, None))]

    def step(self, text: str) -> dict[str, Any]:
        return self._observed(self._environment.step(text))

    def snapshot(self) -> bytes:
        snapshot = self._awaited(self._environment.snapshot())
        if not isinstance(snapshot, bytes):
            raise EnvironmentFailure(Fault.INVALID, f"a snapshot is of type {type(snapshot).__name__}, not bytes")
        if len(snapshot) > self._limits.encoded_bytes:
            raise EnvironmentFailure(Fault.TOO_LARGE, f"a snapshot has more than {self._limits.encoded_bytes} bytes")
        return snapshot

    def restore(self, snapshot: bytes) -> None:
        self._awaited(self._environment.restore(snapshot))

    def demonstrate(self) -> str:
        text = self._awaited(self._environment.demonstrate())
        if not isinstance(text, str):
            raise EnvironmentFailure(Fault.INVALID, f"a demonstration is of type {type(text).__name__}, not str")
        self._check_text("a demonstration", text)
        return text

    def end(self) -> None:
        environment, self._environment = self._environment, None
        if callable(close := getattr(environment, "close", None)):
            self._awaited(close())

    def _awaited(self, value: Any) -> Any:
        async def wait() -> Any:
            return await value

        return self._loop.run(wait()) if inspect.isawaitable(value) else value

    def _observed(self, answer: Any) -> dict[str, Any]:
        """Checks an observation, stores its media, and returns it for msgpack. Raises EnvironmentFailure, DataError."""
        observation = self._awaited(answer)
        if not isinstance(observation, Observation):
            raise EnvironmentFailure(Fault.INVALID, f"returned {type(observation).__name__}, expected an Observation")
        text, done = observation.text, observation.done
        if not isinstance(text, str) or not isinstance(done, bool | np.bool_):
            types = f"text of type {type(text).__name__} and done of type {type(done).__name__}"
            raise EnvironmentFailure(Fault.INVALID, f"an observation has {types}, expected str and bool")
        try:
            reward = finite(observation.reward)
        except ValueError as error:
            raise EnvironmentFailure(Fault.REWARD, f"the reward is {error}") from None
        self._check_text("text", text)
        try:
            info = json.dumps(dict(observation.info), default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFailure(Fault.INVALID, f"info does not fit into JSON: {error}") from None
        self._check_text("info", info)
        try:
            media = stored(observation, self._folder, self._limits)
        except OSError as error:
            raise DataError(f"{self._folder}: media of observations can't be written: {error}") from error
        return {"text": text, "media": media, "reward": reward, "done": bool(done), "info": info}

    def _check_text(self, name: str, text: str) -> None:
        most = self._limits.text_bytes
        try:
            size = len(text) if len(text) > most else len(text.encode())
        except UnicodeEncodeError:
            raise EnvironmentFailure(Fault.INVALID, f"{name} has halves of surrogate pairs") from None
        if size > most:
            raise EnvironmentFailure(Fault.TOO_LARGE, f"{name} has more than {most} bytes")


def _plain(value: Any) -> Any:
    """Returns an array or a number of numpy as JSON's types. Raises TypeError."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")
