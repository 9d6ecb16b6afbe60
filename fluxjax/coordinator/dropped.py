"""Counts the groups that dynamic sampling dropped since the last step, by source and reward.

If all responses of every group have equal rewards, because the verifier is broken or the prompts are far too easy or
too hard, dynamic sampling would draw prompts for ever. `complaint` reports that.
"""

import collections
from collections.abc import Mapping

from ..base.types import Group
from .run_settings import Settings
from .saved import SavedState, State

_NAMED = 3  # the number of a source's most frequent rewards that a complaint names


class Dropped:
    """Counts the groups that were dropped; a part of the ledger."""

    def __init__(self) -> None:
        # of this step, by source and reward
        self.groups: collections.Counter[tuple[str, float]] = collections.Counter()
        self.in_a_row = 0  # dropped groups since the last group whose rewards differ

    @property
    def count(self) -> int:
        """The number of groups dropped since the last step."""
        return self.groups.total()

    def add(self, group: Group) -> None:
        self.groups[group.prompt.source, group.samples[0].reward.value] += 1
        self.in_a_row += 1

    def complaint(self, step: int, kept: int, settings: Settings) -> str:
        """Returns why `step` will never be complete with its `kept` groups; empty while it may become complete.

        verl's bound: the kept and dropped groups of a step come from at most `max_num_gen_batches` batches of
        `prompts_per_step` prompts.
        """
        most, size = settings.max_num_gen_batches, settings.prompts_per_step
        too_many = most and self.count > (most - 1) * size and kept < size
        if not too_many and self.in_a_row < settings.max_skipped_in_a_row:
            return ""
        by = f"rollout.dynamic_sampling is {settings.dynamic_sampling_by.value}"
        bound = f"rollout.max_num_gen_batches is {most}" if too_many else f"{self.in_a_row} of them in a row"
        return (
            f"dynamic sampling dropped {self.count} groups of equal rewards ({by}) for step {step}, which needs {size} "
            f"others ({bound}): {self._told(settings.rewards)}; mend that reward, take prompts of another difficulty"
            + (", raise the bound (0: none)" if too_many else "")
            + ", or choose another rollout.dynamic_sampling (correct, value, off)"
        )

    def _told(self, rewards: Mapping[str, str]) -> str:
        """Lists each source with its rewards, the most frequent first."""
        sources: dict[str, list[str]] = {}
        for (source, value), count in self.groups.most_common():
            sources.setdefault(source, []).append(f"{value:g} ({count})")
        parts = []
        for source, values in sources.items():
            rule = f", reward {rewards[source]}," if source in rewards else ""
            more = ", ..." if len(values) > _NAMED else ""
            parts.append(f"source {source!r}{rule} has {', '.join(values[:_NAMED])}{more}")
        return "; ".join(parts)

    def state_dict(self) -> State:
        groups = [[source, value, count] for (source, value), count in self.groups.items()]
        return {"groups": groups, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: SavedState) -> None:
        self.groups = collections.Counter({(source, value): count for source, value, count in state["groups"]})
        self.in_a_row = state["in_a_row"]
