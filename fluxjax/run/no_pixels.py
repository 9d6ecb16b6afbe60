"""The pixels of a run that has none; `build.open_pixels` chooses between this and `pixels`, the room of media."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..base.timeline import Span
from ..hosts.orders import UNKNOWN_PLACE

if TYPE_CHECKING:
    from models.shadow import Fetch

    from ..base.preprocessor_status import PreprocessorStatus
    from ..data.materializer import Materializer
    from ..data.shadows import ProxyMedia

Tree = TypeVar("Tree")


class NoPixels:
    """Takes the place of `Pixels` in runs of text: nothing is stored or fetched."""

    proxy: ProxyMedia | None = None  # what prompts are prepared by
    fetch: Fetch | None = None  # the pixels of tickets; None where prompts have theirs
    materializer: Materializer | None = None

    def expect(self, batches: Iterable[object]) -> None:
        """Begins to fetch the pixels of these batches, in this order."""

    def read(self, tree: Tree) -> Tree:
        """Returns a pytree, such as a batch or a prompt's `vision`, with its pixels in the place of shadows."""
        return tree

    def place_of(self, ticket: str) -> str:
        """Returns the preprocessor that holds the medium of the ticket; empty if none is known."""
        return UNKNOWN_PLACE

    def hear(self, media: Iterable[tuple[str, str]]) -> None:
        """Takes note of (ticket, place) pairs from process 0: each place holds the medium of its ticket."""

    def begin(self) -> None:
        """Notes that the run begins to ask for prompts."""

    def begin_steps(self) -> None:
        """Begins to count for the steps: what was fetched before them, such as by a warm start, belongs to no step."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics `data/...` of `metrics.jsonl` since the last call; none where there are no shadows."""
        return {}

    def preprocessors(self) -> list[PreprocessorStatus]:
        """Returns the last known status of every preprocessor."""
        return []

    def lanes(self, spans: Sequence[Span]) -> list[Span]:
        """Returns a lane of the Gantt picture for each preprocessor, within the time that `spans` covers."""
        return []

    def draw(self, file: pathlib.Path) -> None:
        """Draws which preprocessor held which medium when; draws nothing if there are no preprocessors."""

    def close(self) -> None: ...
