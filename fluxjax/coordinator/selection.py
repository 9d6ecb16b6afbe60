"""Chooses the scored groups that a step trains on (Flux, component 4): a pure function of groups, seed and step.

Candidates are ordered: as drawn or, with `stalest`, stalest first; with `curriculum` easy groups first, with that order
among equals. Then they are taken from each stratum in proportion to its candidates (`stratify`: strata by staleness;
`diversity`: by source and kinds of media). With `lengths`, those of a stratum are taken that are about as long as the
first candidate. Groups that would soon be too old are taken before all others, so no group starves.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np

from ..base.types import Group

_CHOICE = 2  # candidates considered for each one taken, if lengths are to be similar


def versions_behind(group: Group, version: int) -> int:
    """Counts the versions between the trainer's weights and the oldest weights that generated a token of the group."""
    oldest = min((v for sample in group.samples for v in sample.response.versions), default=version)
    return version - oldest


def total_tokens(group: Group) -> int:
    """Counts the generated tokens of all responses."""
    return sum(sample.response.num_tokens for sample in group.samples)


def difficulty(group: Group) -> float:
    """Returns the share of the responses that are not correct, in [0, 1]."""
    return 1 - sum(sample.reward.correct for sample in group.samples) / max(len(group.samples), 1)


def compose(
    groups: Sequence[Group],
    count: int,
    prefer: Collection[str] = (),
    *,
    version: int,
    max_staleness: int,
    progress: float,
    seed: int,
    step: int,
) -> tuple[Group, ...]:
    """Chooses `count` of `groups`; returns them in draw order.

    A group of staleness `max_staleness - 1` or more could become too old in the next step, so it is taken first,
    stalest groups before others. `prefer` names options of the module's docstring; without any, the other
    groups are taken in draw order.

    `version` is the trainer's, `progress` that of the run, in [0, 1]. Raises `ValueError` for fewer than `count`
    groups, and for a group that is more than `max_staleness` versions old.
    """
    ordered = sorted(groups, key=lambda group: group.prompt.draw)
    if not 0 <= count <= len(ordered):
        raise ValueError(f"{count} groups to choose from {len(ordered)}")
    ages = [versions_behind(group, version) for group in ordered]
    if ages and max(ages) > max_staleness:
        old = ordered[ages.index(max(ages))]
        raise ValueError(
            f"draw {old.prompt.draw} is {max(ages)} versions old; at most {max_staleness} may be trained on"
        )
    everyone = range(len(ordered))
    urgent = sorted((i for i in everyone if ages[i] >= max_staleness - 1), key=lambda i: (-ages[i], i))[:count]
    rng = np.random.default_rng([seed, step])
    ranking = list(everyone)
    if "stalest" in prefer:
        ranking.sort(key=lambda i: -ages[i])
    if "curriculum" in prefer:
        ranking = _easy_first(ranking, [difficulty(group) for group in ordered], progress, rng)
    strata = [_stratum(group, age, prefer) for group, age in zip(ordered, ages, strict=True)]
    lengths = [math.log1p(total_tokens(group)) for group in ordered] if "lengths" in prefer else None
    chosen = _choose(ranking, urgent, count, strata, lengths, rng)
    return tuple(ordered[i] for i in sorted(chosen))


def _stratum(group: Group, age: int, prefer: Collection[str]) -> Hashable:
    kinds = tuple(sorted({media.kind.value for media in group.prompt.media}))
    return age if "stratify" in prefer else None, (group.prompt.source, kinds) if "diversity" in prefer else None


def _easy_first(ranking: Sequence[int], hard: Sequence[float], progress: float, rng: np.random.Generator) -> list[int]:
    """Orders candidates by chance at the start of the run, by difficulty at its end, by a mixture of both in
    between."""
    by_difficulty = sorted(ranking, key=lambda i: hard[i])
    chance = 1 - min(max(progress, 0.0), 1.0)
    places = (1 - chance) * np.arange(len(ranking)) + chance * len(ranking) * rng.random(len(ranking))
    return [by_difficulty[k] for k in np.argsort(places, kind="stable")]


def _choose(
    ranking: Sequence[int],
    urgent: Sequence[int],
    count: int,
    strata: Sequence[Hashable],
    lengths: Sequence[float] | None,
    rng: np.random.Generator,
) -> set[int]:
    chosen = set(urgent)
    if len(chosen) == count:
        return chosen
    quotas = _quotas(Counter(strata), Counter(strata[i] for i in urgent), count, rng)
    rest = [i for i in ranking if i not in chosen]
    anchor = lengths[rest[0]] if lengths else 0.0
    for stratum, quota in quotas.items():
        members = [i for i in rest if strata[i] == stratum]
        wanted = quota - sum(strata[i] == stratum for i in urgent)
        if lengths:
            # The first candidate is nearest to itself: it is taken, whatever its length, and not passed over again and
            # again.
            members = sorted(members[: _CHOICE * wanted], key=lambda i: abs(lengths[i] - anchor))
        chosen.update(members[:wanted])
    return chosen


def _quotas(
    sizes: Mapping[Hashable, int], least: Mapping[Hashable, int], count: int, rng: np.random.Generator
) -> dict[Hashable, int]:
    """Returns the number to take from each stratum: proportional to its size and at least `least`, by largest
    remainders; chance breaks ties."""
    quotas: dict[Hashable, int] = {}
    open_, left, total = dict(sizes), count, sum(sizes.values())
    while over := [key for key, size in open_.items() if least.get(key, 0) * total > size * left]:
        for key in over:
            quotas[key] = least[key]
            del open_[key]
        left, total = count - sum(quotas.values()), sum(open_.values())
    lucky = dict(zip(open_, rng.permutation(len(open_)).tolist(), strict=True))
    quotas |= {key: size * left // total for key, size in open_.items()}
    by_remainder = sorted(open_, key=lambda key: (-(open_[key] * left % total), lucky[key]))
    for key in by_remainder[: count - sum(quotas.values())]:
        quotas[key] += 1
    return quotas
