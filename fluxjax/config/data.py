"""The settings of prompts: their sources, how media are preprocessed, and where."""

import dataclasses

from ..base.errors import ConfigError
from .bounds import not_negative, positive, within
from .rewards import RewardTerm, term_weights


@dataclasses.dataclass(slots=True)
class SourceConfig:
    """A source of training prompts: its file, its reward, and how often prompts are drawn from it."""

    # A .jsonl manifest, .parquet or a folder of such, here or at a URL (s3://, https://, ...); empty: the embedded data
    # set of the source's name.
    path: str = ""
    eval_path: str = ""  # held-out records, same format
    weight: float = positive(1.0)
    reward: str = "exact"  # a name in `fluxjax.rewards`, or module:attribute
    # Several in its place, by name: their weighted sum counts.
    rewards: dict[str, RewardTerm] = dataclasses.field(default_factory=dict, metadata={"entries": RewardTerm})
    eval_reward: str = ""  # of held-out prompts, as `reward`; empty: the same as in training
    warm_start_path: str = ""  # records for the warm start, same format; empty: as embedded, or the training records
    # Names of fields (columns) in the file; empty: the usual names are recognised (`fluxjax.data.fields.ALIASES`).
    prompt_field: str = ""
    answer_field: str = ""
    images_field: str = ""
    videos_field: str = ""
    id_field: str = ""

    @property
    def reward_names(self) -> str:
        """The names of its rewards, for messages."""
        return " + ".join(term.reward or name for name, term in self.rewards.items()) or self.reward

    def validate_rewards(self, field: str) -> None:
        """Raises `ConfigError` for rewards that exclude each other, and for weights that can't be read."""
        if self.rewards and self.reward != type(self)().reward:
            raise ConfigError(f"{field}.reward is {self.reward!r}, but {field}.rewards takes its place; name it there")
        term_weights(self.rewards, f"{field}.rewards")


@dataclasses.dataclass(slots=True)
class DataConfig:
    root: str = ""  # where the embedded data sets are built; empty: the user's cache folder
    embedded_cell: int = not_negative(0)  # pixels of a digit in these, and half of a clip: a merged feature; 0: 16
    sources: dict[str, SourceConfig] = dataclasses.field(default_factory=dict, metadata={"entries": SourceConfig})
    min_pixels: int = not_negative(0)  # 0: as the checkpoint's preprocessor_config.json says
    max_pixels: int = not_negative(0)
    # Larger files are skipped, so that none takes all memory: a small one can hold a huge picture.
    max_decoded_pixels: int = positive(2**26)  # of an image or a video frame, before resizing
    max_decoded_frames: int = positive(2**20)  # of a video
    max_skipped: float = within(0.5, "(0, 1]")  # share of the prompts drawn that may be unusable, from the 100th on
    video_frames: int = positive(4)  # frames sampled from a video
    chat_template: bool = False  # render prompts with the checkpoint's chat template, else plain text
    preprocessors: int = not_negative(0)  # processes that each trainer process starts on its host; 0: it decodes itself
    # Processes that decode: of a preprocessor (0: one a core), or of a run without any (0: its threads). Where a file
    # is decoded in a process, that process is killed at the bounds below. A script that trains with workers needs
    # `if __name__ == "__main__":`, since each process imports it.
    workers: int = not_negative(0)
    decode_seconds: float = positive(60.0)  # that a worker may take for a file
    decode_memory_gib: float = positive(8.0)  # that a worker may need for a file
    cache_gib: float = positive(4.0)  # decoded media that a preprocessor, or a run without any, keeps in memory
    spill_gib: float = not_negative(32.0)  # and on its disk, in the folder `spill`
    spill: str = ""  # empty: a temporary folder
    steps_ahead: int = positive(1)  # steps whose prompts are read, and their media decoded, before they are drawn
    # Decoded media that each process of a run with preprocessors keeps, so that what it needs next is there: half of it
    # for prompts that come, the rest for those that were generated for and will be trained on. 0: none.
    near_gib: float = not_negative(0.0)
    ahead: int = positive(2)  # microbatches whose pixels are fetched before it is their turn
    lease_seconds: float = positive(120.0)  # after which a preprocessor that does not answer has lost its media
