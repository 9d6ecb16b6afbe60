"""One of several processes that train together, for `test_processes`.

Process 0 plans and has everything; the others hear their shares, and have the pixels of no others.
"""

import json
import pathlib
from typing import Any

import host_cases
import jax
import numpy as np
from jax.experimental import multihost_utils
from learner_cases import random_groups
from one_process import SETTINGS, run

from fluxjax.batch.composition import Composition
from fluxjax.hosts.gang import Gang
from fluxjax.hosts.orders import End, Learn, shares_of
from sharding.links import Links


def work(links: Links) -> None:
    gang = Gang(links)
    orders = gang.orders() if gang.process else iter(())
    for strategy, feature in SETTINGS["cases"]:
        train(strategy, feature, gang, orders)
    if gang.process == 0:
        gang.tell(End())
    gang.close()
    multihost_utils.sync_global_devices("end")


def train(strategy: str, feature: str, gang: Gang, orders) -> None:
    """Writes what comes of the groups of each seed: gradients, sums, what the loss read; then the metrics of steps."""
    recorded = host_cases.Recorded(strategy, feature, gang.processes, gang, links=gang.links)
    gang.equip(recorded.config, lambda ticket: "", None)
    for seed in host_cases.SEEDS:
        if gang.process == 0:
            compositions = recorded.composed(seed)
        else:
            shares = heard(next(orders), seed)
            compositions = recorded.followed(gang.laid_out(recorded.composer, shares))
        for number, composition in enumerate(compositions):
            write(recorded, composition, f"{strategy}-{feature}-{seed}-{number}", gang.process)
    steps = SETTINGS["steps"]
    if gang.process == 0:
        print(json.dumps({f"{strategy}-{feature}": recorded.steps(steps)}), flush=True)
    made = steps if gang.process == 0 else 0
    while made < steps:
        order = next(orders)
        shares = heard(order, host_cases.SEEDS[made % len(host_cases.SEEDS)])
        recorded.trainer.follow(shares, order.size, order.update)
        made += order.update


def heard(order, seed: int):
    assert isinstance(order, Learn)
    _, prepared = random_groups(seed)
    return shares_of(order, lambda draws: {draw: prepared[draw].inputs for draw in draws})


def write(recorded: host_cases.Recorded, composition: Composition, name: str, process: int) -> None:
    out = pathlib.Path(SETTINGS["out"])
    for of, (grads, tally) in enumerate(recorded.results(composition)):
        whole = multihost_utils.process_allgather(grads, tiled=True)
        if process == 0:
            leaves: dict[str, Any] = {f"grad {i}": leaf for i, leaf in enumerate(jax.tree.leaves(whole))}
            sums: dict[str, Any] = {f"sum {name}": np.asarray(value) for name, value in tally.sums.items()}
            np.savez(out / f"{name}-{of}.npz", **leaves, **sums)
    read: dict[str, Any] = {f"{draw} {k}": values for (draw, k), values in host_cases.scores(composition).items()}
    np.savez(out / f"{name}-of-{process}.npz", **read)


if __name__ == "__main__":
    run(work)
