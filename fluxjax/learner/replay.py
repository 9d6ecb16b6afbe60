"""Keeps groups that were trained on, so that a later step can train on some of these groups again.

Replay is Flux's third source of data from another policy (component 3, "Unified Importance Correction"). A replayed
token keeps the log-probs and versions of its generation, so that it is treated as any stale token. Rewards are kept,
and advantages are computed anew in each step.

The coordinator's ledger does not count replayed groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ..base.types import ENVIRONMENT, Group, PreparedPrompt, Response, Reward, Sample, SavedState, State
from ..config import ReplayConfig

GROUPS = 256  # groups in the buffer, at most; the oldest groups are removed first


@dataclasses.dataclass
class _KeptGroup:
    group: Group  # with the advantages of the first step that trained on the group
    prepared: PreparedPrompt
    born: int  # the oldest version among the group's tokens
    times: int = 0  # number of replays


class ReplayBuffer:
    """The groups that may be replayed, with their prompts. The choice of groups is deterministic."""

    def __init__(self, config: ReplayConfig, most: int = GROUPS) -> None:
        self._config, self._most = config, most
        self._kept: dict[int, _KeptGroup] = {}  # by draw

    def __len__(self) -> int:
        return len(self._kept)

    def choose(self, fresh: int, version: int) -> tuple[list[Group], dict[int, PreparedPrompt]]:
        """Chooses groups to replay in a step that trains weights of this version on `fresh` fresh groups. Returns the
        groups in the order of their draws, and their prompts by draw. The newest groups are chosen, and count as
        replayed. Groups that are too old, or were already replayed, are removed first."""
        self._let_go(version)
        wanted = int(fresh * self._config.share / (1.0 - self._config.share) + 1e-9)
        chosen = sorted(self._kept.values(), key=lambda kept: (-kept.born, -kept.group.prompt.draw))[:wanted]
        for kept in chosen:
            kept.times += 1
        chosen.sort(key=lambda kept: kept.group.prompt.draw)
        return [kept.group for kept in chosen], {kept.group.prompt.draw: kept.prepared for kept in chosen}

    def keep(self, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt], version: int) -> None:
        """Keeps groups that were trained on. `version` is the version of the present weights. Groups without tokens,
        and groups whose advantages are all 0, are not kept. If there is no room, the oldest groups are removed."""
        for group in groups:
            versions = [sample.response.version_span[0] for sample in group.samples if sample.response.num_trained]
            if versions and group.columns.advantages_GU.any():
                draw = group.prompt.draw
                self._kept[draw] = _KeptGroup(group, prepared[draw], min(versions))
        self._let_go(version)
        oldest_first = sorted(self._kept.items(), key=lambda item: (item[1].born, item[0]))
        self._kept = dict(oldest_first[max(len(oldest_first) - self._most, 0) :])

    def metrics(self, fresh: Sequence[Group], replayed: Sequence[Group], version: int) -> dict[str, float]:
        """Returns the metrics of fresh and replayed groups in a step that trains weights of this version.

        `replay/share` is the share of the step's groups that are replayed. `replay/age` and `replay/age_max` are the
        mean and the largest lag of replayed tokens. `replay/kept` is the number of groups in the buffer after the step.
        With replayed groups, `staleness/lag_mean` and `staleness/lag_max` are measured over the fresh groups alone.
        Fresh groups whose advantages are all 0 are then left out, unless all fresh groups are of this kind.
        """
        metrics = {"replay/share": len(replayed) / (len(fresh) + len(replayed)), "replay/kept": float(len(self))}
        if not replayed:
            return metrics
        taught = [group for group in fresh if group.columns.advantages_GU.any()] or fresh
        for names, groups in (
            (("replay/age", "replay/age_max"), replayed),
            (("staleness/lag_mean", "staleness/lag_max"), taught),
        ):
            versions = np.array([v for g in groups for s in g.samples for v in s.response.versions], np.int64)
            lags = version - versions[versions != ENVIRONMENT]
            if len(lags):
                metrics |= dict(zip(names, (float(lags.mean()), float(lags.max())), strict=True))
        return metrics

    def _let_go(self, version: int) -> None:
        self._kept = {
            draw: kept
            for draw, kept in self._kept.items()
            if version - kept.born <= self._config.max_age and not kept.times
        }

    def state_dict(self) -> State:
        """Returns responses, rewards and draws as JSON values. The state has no prompts."""
        groups: list[State] = []
        for draw, kept in sorted(self._kept.items()):
            samples = sorted(kept.group.samples, key=lambda sample: sample.response.sample)
            responses = [s.response.to_json() for s in samples]
            scores = [[s.response.sample, dataclasses.asdict(s.reward), s.advantage] for s in samples]
            saved = {"draw": draw, "born": kept.born, "times": kept.times, "shown": kept.group.prompt.shown}
            groups.append(saved | {"responses": responses, "scores": scores})
        return {"groups": groups}

    def load_state_dict(self, state: SavedState, prepared: Mapping[int, PreparedPrompt]) -> None:
        """Takes over a state. `prepared` has the prompts of its groups, by draw. Groups whose prompts are not in
        `prepared`, or show something else now, are removed."""
        self._kept = {}
        for saved in state.get("groups", []):
            prompt = prepared.get(draw := saved["draw"])
            if prompt is not None and saved.get("shown", prompt.prompt.shown) == prompt.prompt.shown:
                responses = {response["sample"]: Response.from_json(response) for response in saved["responses"]}
                scored = [Sample(responses[k], Reward(**reward), advantage) for k, reward, advantage in saved["scores"]]
                group = Group(prompt.prompt, tuple(scored))
                self._kept[draw] = _KeptGroup(group, prompt, saved["born"], saved["times"])
