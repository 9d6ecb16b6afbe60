"""The rewards of a step in a few words; their numbers are in `metrics.jsonl`, and on the Prometheus port."""

from __future__ import annotations

from collections.abc import Mapping

_BUSY = "rewards/busy/"
_NOTABLE = 0.5  # share of the places of a kind from which it is named


def reward_words(metrics: Mapping[str, float]) -> str:
    """Says how long rewards take, what they wait for and how many failed; empty where only built-in rules score."""
    words = []
    if "rewards/seconds_median" in metrics:
        words.append(f"{metrics['rewards/seconds_median']:.2g} s, 95 % {metrics['rewards/seconds_p95']:.2g} s")
    if waiting := metrics.get("rewards/waiting", 0.0):
        words.append(f"{waiting:.0f} waited")
    busy = {name.removeprefix(_BUSY): share for name, share in metrics.items() if name.startswith(_BUSY)}
    words += [f"{kind} {share:.0%} busy" for kind, share in busy.items() if share >= _NOTABLE]
    if failed := metrics.get("rewards/failed", 0.0):
        words.append(f"{failed:.0f} failed")
    return ", ".join(words)
