"""The settings of a preprocessor that are flags of its command, as a run has them in `data`."""

from ..config.data import DataConfig

FIELDS = {
    "workers": "processes that decode (0: one a core)",
    "cache_gib": "decoded media kept in memory",
}


def flag(name: str) -> str:
    """The flag of a field, without its dashes."""
    return name.replace("_", "-")


def flags_of(config: DataConfig) -> list[str]:
    """The flags by which a preprocessor gets the settings of a run."""
    return [f"--{flag(name)}={getattr(config, name)}" for name in FIELDS]
