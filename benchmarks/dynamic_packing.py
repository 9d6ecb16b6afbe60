"""Dynamic packing (FlexRL section 3.4): several rounds of a degree, with overlapping transfers.

A run plans one round a degree; the executor takes plans with any number of rounds.
"""

import dataclasses
from collections.abc import Sequence

from sharding.planner.plan import Round, ShardPlan


def repacked(plan: ShardPlan, *, short: int, cap: int, most: int) -> ShardPlan:
    """The plan with its sequences in at most `most` rounds a degree: see `packed_rounds`."""
    rounds = packed_rounds(plan.num_devices, plan.lengths, plan.degrees, plan.firsts, short=short, cap=cap, most=most)
    return dataclasses.replace(plan, rounds=rounds)


def packed_rounds(
    num_devices: int,
    lengths: Sequence[int],
    degrees: Sequence[int],
    firsts: Sequence[int],
    *,
    short: int = 0,
    cap: int = 0,
    most: int = 1,
) -> tuple[Round, ...]:
    """Packs the sequences of each group into sequence groups, and these into rounds.

    Within a group, sequences of at most `short` tokens (h_pack) are joined up to `cap` tokens (H_pack); longer
    sequences stay alone. A degree has at most `most` rounds, and one round if `short` or `cap` is 0. Degree 1 has one
    round, too: it has no all-to-all to hide. A round lasts as long as the longest stream of its groups. Streams are
    therefore dealt longest first, each to the round that it lengthens least. The longest round of a degree comes first.
    """
    packed: list[Round] = []
    for degree in sorted(set(degrees), reverse=True):
        members: list[list[int]] = [[] for _ in range(num_devices // degree)]
        for index, (sharded, first) in enumerate(zip(degrees, firsts, strict=True)):
            if sharded == degree:
                members[first // degree].append(index)
        joined = not short or not cap or most == 1 or degree == 1
        packs = [[indices] if joined and indices else _join(indices, lengths, short, cap) for indices in members]
        packed.extend(Round(degree, groups) for groups in _deal(packs, lengths, min(most, max(map(len, packs)))))
    return tuple(packed)


def _join(indices: Sequence[int], lengths: Sequence[int], short: int, cap: int) -> list[list[int]]:
    """Sequence groups: long sequences alone, each short one in the first group that has room."""
    packs = [[i] for i in indices if lengths[i] > short]
    alone, sizes = len(packs), []
    for i in (i for i in indices if lengths[i] <= short):
        fits = next((k for k, size in enumerate(sizes) if size + lengths[i] <= cap), len(sizes))
        if fits == len(sizes):
            sizes.append(0)
            packs.append([])
        sizes[fits] += lengths[i]
        packs[alone + fits].append(i)
    return packs


def _deal(
    packs: Sequence[Sequence[list[int]]], lengths: Sequence[int], count: int
) -> list[tuple[tuple[int, ...], ...]]:
    """`[count][groups]`: the stream of each group in each round. The group with the most tokens is dealt first."""

    def size(pack: Sequence[int]) -> int:
        return sum(lengths[i] for i in pack)

    totals = [sum(map(size, group)) for group in packs]
    longest = [0] * count
    streams: list[list[list[int]]] = [[[] for _ in packs] for _ in range(count)]
    for group in sorted(range(len(packs)), key=lambda g: (-totals[g], g)):
        mine = [0] * count
        for pack in sorted(packs[group], key=lambda pack: (-size(pack), pack[0])):
            after = [mine[k] + size(pack) for k in range(count)]
            k = min(range(count), key=lambda k: (max(after[k] - longest[k], 0), after[k], k))
            mine[k] = after[k]
            streams[k][group] += pack
        longest = [max(pair) for pair in zip(longest, mine, strict=True)]
    order = sorted(range(count), key=lambda k: (-longest[k], k))
    return [tuple(tuple(sorted(stream)) for stream in streams[k]) for k in order if longest[k]]
