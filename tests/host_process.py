"""One of several processes that train together, for `test_processes`: `host_process.py SETTINGS`, one JSON object.

The step is planned by each of them, of sizes; it has the pixels of its own rows only, those of all others are NaN.
"""

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

SETTINGS = json.loads(sys.argv[1])
os.environ["JAX_PLATFORMS"] = "cpu"
DEVICES = f"--xla_force_host_platform_device_count={SETTINGS['devices']}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"  # the last one counts
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from learner_cases import random_groups, tiny  # noqa: E402
from packing_cases import MODEL, make_config  # noqa: E402

from fluxjax.algorithms import grpo  # noqa: E402
from fluxjax.batch.composer import Composer  # noqa: E402
from fluxjax.learner.learner import Learner  # noqa: E402
from sharding.links import Links, initialize, leave  # noqa: E402


def main() -> None:
    initialize(SETTINGS["coordinator"], SETTINGS["processes"], SETTINGS["process"])
    links = Links(timeout=120.0)
    try:
        gradients()
        multihost_utils.sync_global_devices("end")
        links.barrier("end")
    except Exception as error:
        leave(error, links)
    links.close()


def gradients() -> None:
    """Writes what comes of the groups of each seed: gradients, loss, log-probs of this process's responses."""
    config = make_config(tokens_per_row=64, rows=2)
    learner = Learner(config, tiny((4, 2)), grpo.token_loss)
    shards = range(jax.process_index() * jax.local_device_count(), (jax.process_index() + 1) * jax.local_device_count())
    for seed in SETTINGS["seeds"]:
        composer = Composer(config, jax.device_count(), MODEL.vision)
        groups, prepared = random_groups(seed)
        (share,) = composer.shares(groups, blinded(prepared), [shards])
        mine = {group.samples[0].response.draw for group in share.groups}
        seen = {draw: one for draw, one in prepared.items() if draw in mine}
        groups_seen = [
            dataclasses.replace(one, inputs=seen[one.samples[0].response.draw].inputs) for one in share.groups
        ]
        composition = composer.lay_out(dataclasses.replace(share, groups=tuple(groups_seen)))
        grads, tally = learner.accumulate(composition.microbatches)
        scores = learner.gradients.scores(learner.params, composition.microbatches)
        whole = multihost_utils.process_allgather(grads, tiled=True)
        if jax.process_index() == 0:
            leaves: dict[str, Any] = {f"grad {i}": leaf for i, leaf in enumerate(jax.tree.leaves(whole))}
            sums: dict[str, Any] = {f"sum {name}": np.asarray(value) for name, value in tally.sums.items()}
            np.savez(pathlib.Path(SETTINGS["out"]) / f"step{seed}.npz", **leaves, **sums)
        np.savez(pathlib.Path(SETTINGS["out"]) / f"scores{seed}-{jax.process_index()}.npz", **own(composition, scores))
    print(json.dumps({"done": True}), flush=True)


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


def own(composition, scores) -> dict[str, Any]:
    """The log-probs of the responses in the rows of this process, by draw and sample."""
    from fluxjax.batch.composition import unpack

    arrays = []
    for logprobs, _ in scores:
        shards = sorted(logprobs.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        arrays.append(np.concatenate([np.asarray(shard.data) for shard in shards]))
    return {f"{draw} {sample}": values for (draw, sample), values in unpack(composition, arrays).items()}


if __name__ == "__main__":
    main()
