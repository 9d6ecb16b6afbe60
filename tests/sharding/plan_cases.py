"""Mixes of sequence lengths drawn by bootstrap, and what is wrong with a plan of one. As a command, over many of them:

    python tests/sharding/plan_cases.py 300 [--seed N] [--stretch]

Prints a line for every plan that exceeds a bound (balance 1.03, memory 1.10, traffic 0.85 of fixed degree 8) by more
than an integer program proves it must, and at last a line of JSON: how many plans kept all bounds (`kept`), are exactly
at what is proven the least (`proven_least`), within the planner's tolerance of that, or beyond (`unexplained`: exit 1).
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

from sharding.planner import Limits, flex_ulysses  # noqa: E402
from sharding.planner.plan import ShardPlan, least_load  # noqa: E402

MIXES = ROOT.parent / "shared" / "data" / "lengths" / "flexrl_mixes.json"
BALANCE, MEMORY, TRAFFIC = 1.03, 1.10, 0.85  # traffic: of fixed degree 8
EXACT = 1 + 1e-5  # the solver's gap and rounding
PROVABLE = 32  # devices up to which a bound of the traffic says more than what each sequence needs
FLUIDS = (0.15, 0.05, 0.0)  # of a device's limit: the shorter sequences of a proof, each tried if the one before fails
HOST = 8  # no plan sends more, 16 times dearer, beyond a host of so many devices for less traffic within


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


def faults(case: Case, plan: ShardPlan, near: float = EXACT) -> list[str]:
    """The bounds that a plan exceeds though no proof excuses it: it may reach `near` times what is proven the least.

    Proven is the least balance of plans with `MEMORY`, and the least traffic of plans with `BALANCE` and `MEMORY` whose
    sequences stay within a host. Proofs are computed only where they are needed.
    """
    found, devices, cap = [], case.num_devices, case.cap
    tokens = np.array(case.lengths, float)
    if plan.balance > BALANCE:
        floor = max(
            least_balance(case.lengths, devices, cap, MEMORY),
            least_load(tokens**2, devices, cap) * devices / float((tokens**2).sum()),
        )
        if plan.balance > max(BALANCE, near * floor):
            found.append(f"balance {plan.balance:.4f}, proven least {floor:.4f}")
    memory = max(MEMORY, least_load(tokens, devices, cap) * devices / float(tokens.sum()))
    if plan.memory_ratio > memory * (1 + 1e-9):
        found.append(f"memory {plan.memory_ratio:.4f}")
    moved, fixed = vectors(case.lengths, plan.degrees), vectors(case.lengths, (8,) * len(tokens))
    if moved > TRAFFIC * fixed:
        within = max(HOST, *plan.degrees)
        least = 0.0
        for fluid in FLUIDS if devices <= PROVABLE else ():
            if moved > near * least:
                least = max(least, least_traffic(case.lengths, devices, within, BALANCE, MEMORY, fluid))
        if moved > near * least:
            found.append(f"traffic {moved / fixed:.4f}, proven least {least / fixed:.4f}")
    return found


def stretched(case: Case, seed: int) -> Case:
    """The case with its longest sequence up to twice as long: harder."""
    lengths = list(case.lengths)
    lengths[int(np.argmax(lengths))] = int(max(lengths) * (1 + np.random.default_rng(seed).random()))
    return dataclasses.replace(case, name=f"{case.name}, stretched", lengths=lengths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--stretch", action="store_true", help="the longest sequence of a case is up to twice as long")
    options = parser.parse_args()
    pools = shared_pools(MIXES) if MIXES.exists() else synthetic_pools()
    kept, proven, near, bad = 0, 0, 0, 0
    for seed in range(options.seed, options.seed + options.cases):
        case = drawn(pools, seed)
        case = stretched(case, seed) if options.stretch else case
        plan = flex_ulysses(case.lengths, case.num_devices, Limits(max_degree=case.cap))
        moved = vectors(case.lengths, plan.degrees) / vectors(case.lengths, (8,) * len(case.lengths))
        if plan.balance <= BALANCE and plan.memory_ratio <= MEMORY * (1 + 1e-9) and moved <= TRAFFIC:
            kept += 1
        elif not (wrong := faults(case, plan)):
            proven += 1
        else:
            within = not faults(case, plan, 1 + Limits.tolerance)
            near, bad = near + within, bad + (not within)
            print(f"{case.name}, {case.num_devices} devices, cap {case.cap}: {'; '.join(wrong)}", flush=True)
    figures = {"cases": options.cases, "kept": kept, "proven_least": proven, "near_proven_least": near}
    print(json.dumps(figures | {"unexplained": bad, "pools": sorted(pools)}))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
