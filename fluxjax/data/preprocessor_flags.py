"""The settings of a preprocessor that are flags of its command, as a run has them in `data`."""

from ..config.data import DataConfig

FIELDS = {
    "workers": "processes that decode (0: one a core)",
    "decode_seconds": "that a worker may take for a file",
    "decode_memory_gib": "that a worker may need for a file",
    "cache_gib": "decoded media kept in memory",
    "spill_gib": "decoded media kept on disk",
    "spill": "the folder for these (empty: a temporary one)",
}


def flag(name: str) -> str:
    """The flag of a field, without its dashes."""
    return name.replace("_", "-")


def flags_of(config: DataConfig) -> list[str]:
    """The flags by which a preprocessor gets the settings of a run."""
    return [f"--{flag(name)}={getattr(config, name)}" for name in FIELDS]
