"""One of several processes that train together, for `test_processes`.

The step is planned by each of them, of sizes; it has the pixels of its own rows only, those of all others are NaN.
"""

import dataclasses
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
from fluxjax.config import Config
from fluxjax.hosts.gang import fingerprint, local_shards
from fluxjax.hosts.orders import Learn, decode, encode, share_of, told_all
from sharding.links import Links


def work(links: Links) -> None:
    for strategy in SETTINGS["strategies"]:
        steps(strategy, links)
    multihost_utils.sync_global_devices("end")


def steps(strategy: str, links: Links) -> None:
    """Writes what comes of the groups of each seed: gradients, sums, what the loss read; then the losses of steps."""
    config, process = host_cases.settings(strategy, SETTINGS["processes"]), SETTINGS["process"]
    compositions = {seed: laid_out(config, seed) for seed in host_cases.SEEDS}
    recorded = host_cases.Recorded(config, compositions, links=links)
    out, learner = pathlib.Path(SETTINGS["out"]), recorded.learner
    for seed in host_cases.SEEDS:
        composition = recorded.composition(seed)
        grads, tally = learner.accumulate(composition.everywhere)
        whole = multihost_utils.process_allgather(grads, tiled=True)
        if process == 0:
            leaves: dict[str, Any] = {f"grad {i}": leaf for i, leaf in enumerate(jax.tree.leaves(whole))}
            sums: dict[str, Any] = {f"sum {name}": np.asarray(value) for name, value in tally.sums.items()}
            np.savez(out / f"{strategy}{seed}.npz", **leaves, **sums)
        scores = host_cases.scores(composition).items()
        read: dict[str, Any] = {f"{draw} {sample}": values for (draw, sample), values in scores}
        np.savez(out / f"{strategy}{seed}-{process}.npz", **read)
    print(json.dumps({strategy: recorded.losses(SETTINGS["steps"])}), flush=True)


def laid_out(config: Config, seed: int) -> Composition:
    """This process's part of a step, from orders that have been written and read."""
    groups, prepared = random_groups(seed)
    shares = host_cases.composer(config).shares(groups, blinded(prepared), local_shards(SETTINGS["processes"]))
    order = decode(b"".join(encode(Learn(1, *told_all([shares[SETTINGS["process"]]])[0]))))
    assert isinstance(order, Learn)
    here = share_of(order.rows, order.responses, lambda draws: {draw: prepared[draw].inputs for draw in draws})
    composition = host_cases.composer(config).lay_out(here)
    program = np.array([int(fingerprint(config, composition), 16) % 2**31])
    assert len(np.unique(multihost_utils.process_allgather(program))) == 1, "all would run the same programs"
    return composition


def blinded(prepared):
    """The same prompts, as a process knows them that has none of their media: sizes, and NaN for each value."""
    blind = {}
    for draw, one in prepared.items():
        vision = one.inputs.vision
        if vision is not None:
            patches = np.full_like(vision.patches_PX, np.nan)
            inputs = dataclasses.replace(one.inputs, vision=dataclasses.replace(vision, patches_PX=patches))
            one = dataclasses.replace(one, inputs=inputs)
        blind[draw] = one
    return blind


if __name__ == "__main__":
    run(work)
