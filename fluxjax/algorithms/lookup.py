"""The built-in algorithms by name, and the search for the one that a configuration means. The trainer looks it up here
and never asks which it got."""

import functools
import hashlib
import importlib
import inspect
import pathlib
from collections.abc import Mapping

from ..base.import_path import imported
from ..config import AlgorithmConfig, ConfigError
from . import sft
from .cispo import CISPO
from .dapo import DAPO
from .distillation import Distillation
from .dpo import DPO
from .dr_grpo import DrGRPO
from .grpo import GRPO
from .gspo import GSPO
from .ppo import PPO
from .reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from .rl_algorithm import RLAlgorithm, adapted
from .rloo import RLOO

ALGORITHMS: Mapping[str, RLAlgorithm] = {
    "grpo": GRPO(),
    "dr_grpo": DrGRPO(),
    "dapo": DAPO(),
    "gspo": GSPO(),
    "cispo": CISPO(),
    "rloo": RLOO(),
    "reinforce_plus_plus": ReinforcePlusPlus(),
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline(),
    "ppo": PPO(),
    "distillation": Distillation(),
    "dpo": DPO(),
    "sft": adapted(sft, "sft"),
}


def find_algorithm(cfg: AlgorithmConfig) -> RLAlgorithm:
    """Returns `cfg.impl`, or else the algorithm called `cfg.name`: one of `ALGORITHMS`, or an import path,
    `module:attribute`. Raises `ConfigError`, naming the field, where there is none."""
    if isinstance(cfg.impl, str):  # read from the folder of a run, or sent by its first process
        raise ConfigError(
            f"algorithm.impl was an object of {cfg.impl} in a Python script; run the script, or name the algorithm by "
            "an import path (algorithm.name=module:attribute)"
        )
    if cfg.impl is not None:
        return adapted(cfg.impl, "algorithm.impl")
    if cfg.name in ALGORITHMS:
        return ALGORITHMS[cfg.name]
    cfg.validate()
    found = imported(cfg.name, "algorithm.name", lambda value: hasattr(value, "token_loss"))
    return adapted(found, f"algorithm.name={cfg.name}")


def own_code(cfg: AlgorithmConfig) -> str:
    """Returns the digest of the file that a user's algorithm is written in; empty for built-in algorithms, and where
    there is no file. Modules that the file imports are not in the digest."""
    if cfg.built_in:
        return ""
    named = importlib.import_module(cfg.name.partition(":")[0]) if cfg.impl is None else cfg.impl
    try:
        file = inspect.getsourcefile(named if hasattr(named, "__name__") else type(named))
    except TypeError:  # it was made where there are no files
        return ""
    return _digest(file) if file else ""


@functools.cache
def _digest(file: str) -> str:
    path = pathlib.Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
