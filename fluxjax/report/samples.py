"""Writes samples of responses to `samples/STEP.jsonl` in the run's folder, and reads them.

A line is a JSON object. `numbers` has token ids, log-probs and versions, as base64 of `Response.data`; `pieces` has the
text of each token. `refs` has kind, path, cell and stamp of each medium (`base/medium.py`); a path that is not absolute
begins in the run's folder. Files of earlier releases lack these fields. Episodes also have rewards of turns, the
references of each observation's media (`observed`), and what a turn saw (`Prompt.context`).
"""

import base64
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base.errors import DataError
from ..base.medium import Media
from ..base.scored import ResponseNumbers, numbers_of
from ..base.types import ENVIRONMENT, Group
from ..data.locations import is_url, local

Decode = Callable[..., str]  # `Processor.decode`
SAMPLES, MEDIA = "samples", "media"  # folders in the folder of a run
_MOST_BYTES = 2**22  # of a medium that is in no file; a larger one is only named
_LONGEST = 8  # tokens of one character: a token of a byte-level tokenizer may end within a character


def dump_samples(run_dir: pathlib.Path, step: int, groups: Sequence[Group], decode: Decode, count: int) -> None:
    """Writes `count` responses of `step` to `samples/<step>.jsonl`. The groups take turns, so that several sources
    occur. Bytes of media that are in no file are written to `media/<sha256>`."""
    (run_dir / SAMPLES).mkdir(exist_ok=True)
    most = max(len(group.samples) for group in groups)
    turns = [(g, g.samples[turn]) for turn in range(most) for g in groups if turn < len(g.samples)]
    # Lone surrogates, which UTF-8 lacks, are escaped as JSON escapes them.
    with _file(run_dir, step).open("w", encoding="utf-8", errors="backslashreplace") as file:
        for group, sample in turns[:count]:
            prompt, response, reward = group.prompt, sample.response, sample.reward
            record = {
                "step": step,
                "source": prompt.source,
                "id": prompt.id,
                "prompt": prompt.text,
                "media": [item.name for item in prompt.media],
                "answer": prompt.answer,
                "response": decode(response.token_ids),
                "finish": response.finish,
                "reward": round(reward.value, 4),
                "reason": reward.reason,
                "parts": {name: round(value, 4) for name, value in reward.parts.items()},
                "advantage": round(sample.advantage, 4),
                "logprob": round(sum(response.logprobs), 4),
                "versions": sorted(set(response.versions) - {ENVIRONMENT}),
                "draw": prompt.draw,
                "refs": [_reference(item, run_dir) for item in prompt.media],
                "numbers": base64.b64encode(response.data).decode(),
                "pieces": pieces(response.token_ids, decode),
            }
            if response.rewards:
                turns = {"turn_rewards": response.rewards, "turn_advantages": sample.turn_advantages}
                record |= {name: [round(value, 4) for value in values] for name, values in turns.items()}
                record["observed"] = [[_reference(m, run_dir) for m in media] for media in response.observed_media]
                record["context"] = prompt.context
            if reward.seconds:  # built-in rules take no time
                record["reward_seconds"] = round(reward.seconds, 4)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _file(run_dir: pathlib.Path, step: int) -> pathlib.Path:
    return run_dir / SAMPLES / f"{step:06d}.jsonl"


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Returns the text of each token, also of special ones. Of several tokens of a character, the last has its text."""
    text_of = functools.cache(lambda some: decode(some, skip_special_tokens=False))  # tokens occur often
    texts, begun = [], 0
    for end in range(1, len(ids) + 1):
        text = text_of(tuple(ids[begun:end]))
        if text.endswith("\ufffd") and end - begun < _LONGEST and end < len(ids):
            texts.append("")
        else:
            texts.append(text)
            begun = end
    return texts


def _reference(media: Media, run_dir: pathlib.Path) -> list[str]:
    path = media.path
    if media.data is not None and len(media.data) <= _MOST_BYTES:
        path = f"{MEDIA}/{hashlib.sha256(media.data).hexdigest()}"
        (run_dir / MEDIA).mkdir(exist_ok=True)
        (run_dir / path).write_bytes(media.data)
    elif media.data is None and not is_url(path):
        path = os.path.abspath(local(path)).removeprefix(f"{run_dir.absolute()}{os.sep}")
    return [media.kind.value, path, media.cell, media.stamp]


def dumped_steps(run_dir: pathlib.Path, step: int | None = None) -> list[int]:
    """Returns the steps with dumped samples, the newest first, or only `step`. Raises `DataError` if there are none."""
    names = [file.stem for file in (run_dir / SAMPLES).glob("*.jsonl")]
    steps = sorted((int(name) for name in names if name.isdecimal()), reverse=True)
    if not steps:
        raise DataError(f"{run_dir} is no run folder with samples (see report.dump_samples_every)")
    if step is not None and step not in steps:
        raise DataError(f"{run_dir} has no samples of step {step}, only of {', '.join(map(str, steps))}")
    return steps if step is None else [step]


def read_samples(run_dir: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Returns the records of a step's samples in the order of lines. A line that is damaged, or was cut off when a
    process ended, is an empty record. Numbers that are not finite are None. Raises OSError for an unreadable file."""
    records = []
    with _file(run_dir, step).open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                record = json.loads(line, parse_constant=lambda name: None)
            except (ValueError, RecursionError):
                record = {}
            records.append(record if isinstance(record, dict) else {})
    return records


def recorded_numbers(record: Mapping[str, Any]) -> ResponseNumbers | None:
    """Returns the numbers of a sample's response, or None without any. Raises `DataError` if they are damaged."""
    try:
        return numbers_of(base64.b64decode(record["numbers"], validate=True)) if "numbers" in record else None
    except (ValueError, TypeError) as error:
        raise DataError(f"the tokens of a sample are damaged: {error}") from error
