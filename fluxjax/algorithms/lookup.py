"""The built-in algorithms by name, and the search for the algorithm of a configuration. The trainer looks its algorithm
up here and never asks which algorithm it is."""

import functools
import hashlib
import importlib
import inspect
import pathlib
from collections.abc import Mapping

from sharding.door import ByName

from ..base.import_path import imported
from ..config import AlgorithmConfig
from .rl_algorithm import RLAlgorithm, adapted

ALGORITHMS: Mapping[str, RLAlgorithm] = ByName(
    __name__,
    {
        "grpo": "grpo:GRPO",
        "dr_grpo": "grpo:GRPO",
        "dapo": "grpo:GRPO",
        "gspo": "gspo:GSPO",
        "cispo": "cispo:CISPO",
        "rloo": "rloo:RLOO",
        "reinforce_plus_plus": "reinforce_plus_plus:ReinforcePlusPlus",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus:ReinforcePlusPlusBaseline",
        "ppo": "ppo:PPO",
        "distillation": "distillation:Distillation",
        "dpo": "dpo:DPO",
        "sft": "sft",
    },
    adapted,
)


def find_algorithm(cfg: AlgorithmConfig) -> RLAlgorithm:
    """Returns the algorithm `cfg.name`: the object itself, a name of `ALGORITHMS`, or an import path,
    `module:attribute`. Raises `ConfigError`, naming the field, if there is no such algorithm."""
    if not isinstance(cfg.name, str):
        return adapted(cfg.name, "algorithm.name")
    if cfg.name in ALGORITHMS:
        return ALGORITHMS[cfg.name]
    cfg.validate()
    found = imported(cfg.name, "algorithm.name", lambda value: hasattr(value, "token_loss"))
    return adapted(found, f"algorithm.name={cfg.name}")


def own_code(cfg: AlgorithmConfig) -> str:
    """Returns the digest of the file that defines a user's algorithm; empty for built-in algorithms, and for code that
    no file has. The digest does not cover modules that the file imports."""
    if cfg.built_in:
        return ""
    named = importlib.import_module(cfg.name.partition(":")[0]) if isinstance(cfg.name, str) else cfg.name
    try:
        file = inspect.getsourcefile(named if hasattr(named, "__name__") else type(named))
    except TypeError:  # the class has no source file, as in a notebook
        return ""
    return _digest(file) if file else ""


@functools.cache
def _digest(file: str) -> str:
    path = pathlib.Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
