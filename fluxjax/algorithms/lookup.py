"""The built-in algorithms by name, and the search for the algorithm of a configuration. The trainer looks its algorithm
up here and never asks which algorithm it is."""

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
    """Returns `cfg.impl`, or else the algorithm called `cfg.name`: a name of `ALGORITHMS`, or an import path,
    `module:attribute`. Raises `ConfigError`, naming the field, if there is no such algorithm."""
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
    """Returns the digest of the file that defines a user's algorithm; empty for built-in algorithms, and for code that
    no file has. The digest does not cover modules that the file imports."""
    if cfg.built_in:
        return ""
    named = importlib.import_module(cfg.name.partition(":")[0]) if cfg.impl is None else cfg.impl
    try:
        file = inspect.getsourcefile(named if hasattr(named, "__name__") else type(named))
    except TypeError:  # the class has no source file, as in a notebook
        return ""
    return _digest(file) if file else ""


@functools.cache
def _digest(file: str) -> str:
    path = pathlib.Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
