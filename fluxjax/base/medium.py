"""A medium of a prompt, by reference, and what a turn sees of its episode. Neither JAX nor numpy is imported, because
decoder processes and flags need neither."""

import dataclasses
import enum
import re

# A turn sees its whole episode; only the newest observation; or all texts, but only the newest K media.
WHOLE, TURN = "whole", "turn"
CONTEXT = re.compile(f"{WHOLE}|{TURN}|images:([1-9][0-9]*)")


class MediaKind(enum.Enum):
    IMAGE = "image"
    VIDEO = "video"


@dataclasses.dataclass(frozen=True)
class Media:
    """A medium by reference, without its pixels. `path` is a local file or a URL. In a parquet file, `cell` names one
    medium (`COLUMN/ROW/INDEX`), and `stamp` is the version of the file that the record was read from. `data` are the
    encoded bytes of a medium that no file holds."""

    kind: MediaKind
    path: str
    data: bytes | None = dataclasses.field(default=None, repr=False)
    cell: str = ""
    stamp: str = ""

    @property
    def name(self) -> str:
        """The name of the medium in messages."""
        return f"{self.path}#{self.cell}" if self.cell else self.path
