"""A tiny vision-language model learns from real images and real video files by reinforcement learning.

    python -m fluxjax.train --config=configs/vlm.py
    python -m fluxjax.train --config=configs/vlm.py:debug      (the whole loop in less than a minute)

Nothing is downloaded: strips of handwritten digits (PNG) and clips panned over photographs (h264) are built once
from data inside scikit-learn and scikit-image.
"""

from fluxjax.config import Config, ConfigError, SourceConfig


def get_config(variant: str = "") -> Config:
    config = Config(name="vlm")
    config.data.sources = {
        "digits": SourceConfig(reward="digits"),
        "pans": SourceConfig(reward="exact"),
    }
    if variant == "debug":
        config.name = "vlm-debug"
        config.steps = 4
    elif variant:
        raise ConfigError(f"configs/vlm.py has the variants '' and 'debug', not {variant!r}")
    return config
