"""Workloads with known response lengths for the length predictor, and how well a prediction ranks them."""

import csv
import pathlib
from typing import Any

import numpy as np
import scipy.stats

from fluxjax.base.types import Media, MediaKind, Prompt
from fluxjax.coordinator.lengths import LengthPredictor

LIMIT = 16_384  # tokens
Workload = list[tuple[Prompt, list[int]]]  # prompts with the lengths of their responses


def synthetic(seed: int, prompts: int, responses: int = 16) -> Workload:
    """A prompt-level times a response-level lognormal in the shape of Flexes, figure 2a and issue 5: the longest of
    about 1,000 is some 26 times the median, the 75th percentile twice. Source, topic and length of the text explain
    a part of the prompt's level, the rest shows in the lengths only."""
    rng = np.random.default_rng(seed)
    topics = {"photo": -0.6, "prime": -0.35, "parser": -0.1, "socket": 0.1, "matrix": 0.35, "integral": 0.6}
    sources = {"math": 0.2, "code": 0.0, "vqa": -0.2}
    out = []
    for draw in range(prompts):
        source, topic = str(rng.choice(list(sources))), str(rng.choice(list(topics)))
        count = int(rng.integers(5, 60))
        text = " ".join([topic, *(f"w{'abcdefghij'[rng.integers(10)]}" for _ in range(count))])
        level = sources[source] + topics[topic] + 0.3 * (np.log(count) - 3.2) + rng.normal(0, 0.5)
        lengths = 550 * np.exp(level + rng.normal(0, 0.7, responses))
        media = (Media(MediaKind.IMAGE, "x.png"),) if source == "vqa" else ()
        prompt = Prompt(f"p{draw}", source, text, "", media, draw)
        out.append((prompt, [int(n) for n in np.clip(lengths.round(), 1, LIMIT)]))
    return out


def questions(file: pathlib.Path) -> Workload:
    """NExT-QA: questions about videos, and how many characters the right answer has. In random order."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    order = np.random.default_rng(0).permutation(len(rows))
    return [
        (Prompt(str(i), "nextqa", rows[i]["question"], "", (), draw), [len(rows[i]["a" + rows[i]["answer"]])])
        for draw, i in enumerate(order)
    ]


def taught(workload: Workload, responses: int = 8, limit: int = LIMIT) -> LengthPredictor:
    predictor = LengthPredictor(limit)
    for prompt, lengths in workload:
        for length in lengths[:responses]:
            predictor.observe(prompt, length)
    return predictor


def rank_correlation(a, b) -> float:
    """Spearman's; 0 where one side says nothing."""
    if not (np.ptp(a) and np.ptp(b)):
        return 0.0
    found: Any = scipy.stats.spearmanr(a, b)
    return float(found.statistic)


def source_means(train: Workload, held_out: Workload) -> list[float]:
    """The baseline: each response of the second is predicted as the mean of its source in the first."""
    seen: dict[str, list[int]] = {}
    for prompt, lengths in train:
        seen.setdefault(prompt.source, []).extend(lengths)
    return [float(np.mean(seen[prompt.source])) for prompt, lengths in held_out for _ in lengths]
