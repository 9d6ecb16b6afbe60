"""One of several processes of a run under ODC, for `test_odc_processes`.

A learner and checkpoints; a process may be killed for real, hang, or fail in the middle of a minibatch.
"""

import json
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
from checkpoint_cases import save
from jax.experimental import multihost_utils
from learner_cases import tiny
from one_process import SETTINGS, run
from packing_cases import make_config, make_groups

import models
from fluxjax.algorithms import grpo
from fluxjax.batch.composer import Composer
from fluxjax.config import ODC
from fluxjax.learner.learner import Learner
from fluxjax.run.checkpoint import Checkpoints
from models.config import DecoderConfig
from sharding.links import Links
from sharding.odc.executor import Worker
from sharding.weights import like


def training(links: Links) -> None:
    """One learner steps, with a checkpoint after each step, for each folder of checkpoints; says the step of the
    checkpoint it went on from, and where it came to."""
    config = make_config(tokens_per_row=64, rows=4)
    config.sharding.strategy = ODC(deterministic=True)
    model = models.create(DecoderConfig("qwen2", text=tiny((4, 2)).config.text), seed=3)
    learner = Learner(config, model, grpo.token_loss, links=links)
    composer = Composer(config, learner.mesh.size, text=model.config.text)
    ends = []
    for folder in SETTINGS["checkpoints"]:
        checkpoints = Checkpoints(pathlib.Path(folder), keep=2)
        first = checkpoints.undamaged()
        if first is not None:
            _, arrays, _ = checkpoints.restore(like(learner.state()))
            learner.load_state(arrays)
        for step in range((first or 0) + 1, SETTINGS["steps"] + 1):
            groups, prepared = make_groups([[3]] * 8, [[9], [5], [200], [2], [150], [190], [30], [180]], seed=step)
            composition = composer.compose(groups, prepared)
            if step == SETTINGS.get("fault_step"):
                break_down(SETTINGS["fault"])
            learner.step(composition.microbatches)
            save(checkpoints, step, learner.state(), {})
            checkpoints.wait()
        checkpoints.close()
        ends.append((first, [float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(learner.params)]))
    print(json.dumps({"ends": ends}), flush=True)
    multihost_utils.sync_global_devices("end")


def break_down(fault: str) -> None:
    """From now on, this process dies, hangs or fails when it comes to a certain layer."""
    step = Worker._next

    def broken(self, window, number, place):
        rows = step(self, window, number, place)
        if place == "layers[1] backward":
            if fault == "raise":
                raise MemoryError("no room for 3 GB")
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        return rows

    Worker._next = broken


if __name__ == "__main__":
    run(training)
