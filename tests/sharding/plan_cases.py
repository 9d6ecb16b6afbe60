"""Mixes of sequence lengths drawn by bootstrap, and what is wrong with a plan of one. As a command, over many of them:

python tests/sharding/plan_cases.py 300 [--seed N]
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).parent)]

import numpy as np  # noqa: E402
from plan_bounds import least_balance, least_traffic  # noqa: E402

from sharding.plan import ShardPlan  # noqa: E402
from sharding.planner import Limits, flex_ulysses  # noqa: E402
from sharding.planner.limits import least_load  # noqa: E402

MIXES = ROOT.parent / "shared" / "data" / "lengths" / "flexrl_mixes.json"
BALANCE, MEMORY, TRAFFIC = 1.03, 1.10, 0.85  # traffic: of fixed degree 8
NEAR = 1.03  # a proven bound is rarely reached: so near to it is good enough
PROVABLE = 16  # devices up to which a bound of the traffic says more than what each sequence needs


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    lengths: list[int]
    num_devices: int
    cap: int


def drawn(pools: dict[str, np.ndarray], seed: int) -> Case:
    """Sequences of one mix, with replacement; two or four for each device."""
    rng = np.random.default_rng(seed)
    name = sorted(pools)[rng.integers(len(pools))]
    devices = int(rng.choice([16, 32, 64, 128]))
    lengths = rng.choice(pools[name], devices * int(rng.choice([2, 2, 2, 4]))).tolist()
    return Case(f"{name} seed {seed}", lengths, devices, min(devices, int(rng.choice([8, 16, 32]))))


def shared_pools(file: pathlib.Path) -> dict[str, np.ndarray]:
    pools = collections.defaultdict(list)
    for case in json.loads(file.read_text()):
        pools[case["name"].rsplit("_", 1)[0]] += [sequence["length"] for sequence in case["sequences"]]
    return {name: np.array(lengths) for name, lengths in pools.items()}


def synthetic_pools() -> dict[str, np.ndarray]:
    """Lengths like those: questions on one image, short videos, long ones cut to a number of frames."""
    rng = np.random.default_rng(0)
    image, short = rng.lognormal(6.2, 0.5, 1000), rng.lognormal(9.1, 0.6, 1000).clip(1500, 43_000)
    long = rng.normal(32_500, 150, 1000)
    parts = {"image_heavy": (62, 27, 11), "video_heavy": (12, 22, 66)}
    pools = {
        name: np.concatenate([source[: 10 * share] for source, share in zip((image, short, long), shares, strict=True)])
        for name, shares in parts.items()
    }
    pools["only_video"] = rng.normal(8300, 250, 1000)
    return {name: lengths.astype(int) for name, lengths in pools.items()}


def vectors(lengths: list[int], degrees: tuple[int, ...]) -> float:
    return float(sum(n * (p - 1) / p for n, p in zip(lengths, degrees, strict=True)))


def faults(case: Case, plan: ShardPlan) -> list[str]:
    """The bounds that a plan exceeds though no proof excuses it. Bounds are computed only where they are needed."""
    found, devices, cap = [], case.num_devices, case.cap
    tokens = np.array(case.lengths, float)
    if plan.balance > BALANCE:
        floor = max(
            least_balance(case.lengths, devices, cap, MEMORY),
            least_load(tokens**2, devices, cap) * devices / float((tokens**2).sum()),
        )
        if plan.balance > NEAR * floor:
            found.append(f"balance {plan.balance:.4f}, proven least {floor:.4f}")
    memory = max(MEMORY, least_load(tokens, devices, cap) * devices / float(tokens.sum()))
    if plan.memory_ratio > memory * (1 + 1e-9):
        found.append(f"memory {plan.memory_ratio:.4f}")
    moved, fixed = vectors(case.lengths, plan.degrees), vectors(case.lengths, (8,) * len(tokens))
    if moved > TRAFFIC * fixed:
        # Of plans as even as this one promises to be.
        even = 1 + Limits.tolerance
        least = least_traffic(case.lengths, devices, cap, even, MEMORY) if devices <= PROVABLE else 0.0
        if moved > NEAR * least:
            found.append(f"traffic {moved / fixed:.4f}, proven least {least / fixed:.4f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pools = shared_pools(MIXES) if MIXES.exists() else synthetic_pools()
    bad = 0
    for seed in range(options.seed, options.seed + options.cases):
        case = drawn(pools, seed)
        if wrong := faults(case, flex_ulysses(case.lengths, case.num_devices, Limits(max_degree=case.cap))):
            bad += 1
            print(f"{case.name}, {case.num_devices} devices, cap {case.cap}: {'; '.join(wrong)}")
    print(json.dumps({"cases": options.cases, "unexplained": bad, "pools": sorted(pools)}))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
