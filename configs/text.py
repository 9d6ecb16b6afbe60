"""A tiny text-only model learns to reverse strings by reinforcement learning; nothing here knows of pixels.

python -m fluxjax.train --config=configs/text.py
"""

from fluxjax.config import Config, ConfigError, SourceConfig


def get_config(variant: str = "") -> Config:
    config = Config(name="text")
    config.model.vision = False
    config.data.sources = {"reverse": SourceConfig(reward="exact")}
    if variant == "debug":
        config.name = "text-debug"
        config.steps = 4
    elif variant:
        raise ConfigError(f"configs/text.py has the variants '' and 'debug', not {variant!r}")
    return config
