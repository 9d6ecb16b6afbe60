"""Readable dumps of the policy's responses, each a line of JSON."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence

from ..base.types import Group


def dump_samples(
    folder: pathlib.Path, step: int, groups: Sequence[Group], decode: Callable[[Sequence[int]], str], count: int
) -> None:
    """Writes `count` responses of `step` to `folder/<step>.jsonl`: one of each group in turn, so that all sources show
    up."""
    folder.mkdir(exist_ok=True)
    most = max(len(group.samples) for group in groups)
    turns = [(g, g.samples[turn]) for turn in range(most) for g in groups if turn < len(g.samples)]
    with (folder / f"{step:06d}.jsonl").open("w") as file:
        for group, sample in turns[:count]:
            record = {
                "step": step,
                "source": group.prompt.source,
                "id": group.prompt.id,
                "prompt": group.prompt.text,
                "media": [item.path for item in group.prompt.media],
                "answer": group.prompt.answer,
                "response": decode(sample.response.token_ids),
                "finish": sample.response.finish,
                "reward": round(sample.reward.value, 4),
                "reason": sample.reward.reason,
                "advantage": round(sample.advantage, 4),
                "logprob": round(sum(sample.response.logprobs), 4),
                "versions": sorted(set(sample.response.versions)),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
