"""fluxjax: reinforcement-learning post-training of vision-language models in JAX."""

import importlib
import importlib.util
import pathlib
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def _guard_siblings() -> None:
    """Raises ImportError if a sibling package is missing, or if Python finds another package of the same name."""
    for name in ("models", "sharding", "rollout"):
        spec = importlib.util.find_spec(name)
        found = pathlib.Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None:
            raise ImportError(
                f"fluxjax needs its sibling package '{name}' in {_ROOT}; run from the checkout or "
                f"install it with `pip install -e {_ROOT}`"
            )
        if found != _ROOT / name / "__init__.py":
            raise ImportError(
                f"fluxjax needs the package '{name}' of {_ROOT}, but Python finds another one at {found}; "
                f"put {_ROOT} first on PYTHONPATH or remove the other package"
            )


_guard_siblings()

_EXPORTED = {  # what `from fluxjax import NAME` imports, when it is asked for: `import fluxjax` loads no JAX
    "FluxTrainer": "run.trainer",
    "FluxConfig": "run.flux_api",
    "RewardConfig": "run.flux_api",
    "RewardFunction": "run.flux_api",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTED:
        raise AttributeError(f"module 'fluxjax' has no attribute {name!r}", name=name)
    return getattr(importlib.import_module(f"fluxjax.{_EXPORTED[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_EXPORTED]
