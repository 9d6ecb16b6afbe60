"""The settings of prompts: their sources, how media are preprocessed, and where."""

import dataclasses

from ..base.errors import ConfigError
from .bounds import not_negative, positive
from .rewards import RewardTerm, term_weights

COLUMNS = ("prompt", "answer", "images", "videos", "id")


@dataclasses.dataclass(slots=True)
class SourceConfig:
    """A source of training prompts: its file, its reward, and how often prompts are drawn from it."""

    # A .jsonl manifest, .parquet or a folder of such, here or at a URL (s3://, https://, ...); empty: the embedded data
    # set of the source's name.
    path: str = ""
    eval_path: str = ""  # held-out records, same format
    weight: float = positive(1.0)  # how often prompts are drawn from it, relative to others
    reward: str = "exact"  # a name in `fluxjax.rewards`, or module:attribute
    # Several in its place, by name: their weighted sum counts.
    rewards: dict[str, RewardTerm] = dataclasses.field(default_factory=dict, metadata={"entries": RewardTerm})
    eval_reward: str = ""  # of held-out prompts, as `reward`; empty: the same as in training
    warm_start_path: str = ""  # records for the warm start, same format; empty: as embedded, or the training records
    # Names of the file's columns, by what they hold: prompt, answer, images, videos, id. The usual names are recognised
    # (`fluxjax.data.sources.ALIASES`).
    columns: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def reward_names(self) -> str:
        """The names of its rewards, for messages."""
        return " + ".join(term.reward or name for name, term in self.rewards.items()) or self.reward

    def validate_rewards(self, field: str) -> None:
        """Raises `ConfigError` for rewards that exclude each other, and for weights that can't be read."""
        if self.rewards and self.reward != type(self)().reward:
            raise ConfigError(f"{field}.reward is {self.reward!r}, but {field}.rewards takes its place; name it there")
        term_weights(self.rewards, f"{field}.rewards")

    def validate_columns(self, field: str) -> None:
        """Raises `ConfigError` for a column that is not one of `COLUMNS`."""
        for name, column in self.columns.items():
            if name not in COLUMNS or not isinstance(column, str):
                raise ConfigError(f"{field}.columns has {name!r}: {column!r}; it names {', '.join(COLUMNS)} by text")


@dataclasses.dataclass(slots=True)
class DataConfig:
    sources: dict[str, SourceConfig] = dataclasses.field(default_factory=dict, metadata={"entries": SourceConfig})
    min_pixels: int = not_negative(0)  # 0: as the checkpoint's preprocessor_config.json says
    max_pixels: int = not_negative(0)  # of an image or a frame, after resizing; 0: the same
    video_frames: int = positive(4)  # frames sampled from a video
    chat_template: bool = False  # render prompts with the checkpoint's chat template, else plain text
    preprocessors: int = not_negative(0)  # processes that each trainer process starts on its host; 0: it decodes itself
    # Processes that decode: of a preprocessor (0: one a core), or of a run without any (0: its threads). Where a file
    # is decoded in a process, that process is killed at the bounds below. A script that trains with workers needs
    # `if __name__ == "__main__":`, since each process imports it.
    workers: int = not_negative(0)
    cache_gib: float = positive(4.0)  # decoded media that a preprocessor, or a run without any, keeps in memory
    spill_gib: float = not_negative(32.0)  # and on its disk, in the system's folder for temporary files (TMPDIR)
    # Decoded media that each process of a run with preprocessors keeps, so that what it needs next is there: half of it
    # for prompts of the next two steps, the rest for those that were generated for and will be trained on. 0: none.
    near_gib: float = not_negative(0.0)
