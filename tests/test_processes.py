"""Training over several real processes on this machine equals one process with as many devices."""

import functools
import os

import host_cases
import jax
import numpy as np
import pytest
from host_cases import DEVICES, SEEDS, STRATEGIES
from learner_cases import TOLERANCE, random_groups
from process_cases import Processes
from turns import has_come

from sharding.mesh import make_mesh

STEPS = int(os.environ.get("FLUXJAX_RECORDED_STEPS", "3"))  # docs/log.md has 50, and every strategy over four, too
TURNS = [  # of each, which strategies of how many processes
    {2: ["fsdp", "hybrid"]},
    {4: ["ulysses"]},
    {2: ["flex_ulysses", "odc"]},
]
if STEPS >= 50:
    TURNS = [{2: STRATEGIES, 4: STRATEGIES}]
CASES = [
    pytest.param(processes, strategy, marks=pytest.mark.turn(turn))
    for turn, tried in enumerate(TURNS)
    for processes, strategies in tried.items()
    for strategy in strategies
]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """(folder, losses) of so many processes: what they wrote and said of all steps."""
    return functools.cache(functools.partial(trained, tmp_path_factory))


def trained(tmp_path_factory, processes):
    folder = tmp_path_factory.mktemp("several")
    coming = [tried for turn, tried in enumerate(TURNS) if has_come(turn)]
    strategies = [strategy for tried in coming for strategy in tried.get(processes, [])]
    settings = {"devices": DEVICES // processes, "strategies": strategies, "steps": STEPS, "out": str(folder)}
    with Processes("host_process.py", folder, [{}] * processes, **settings) as run:
        assert run.ends(1500) == [0] * processes, "".join(map(run.errors, range(processes)))
        said = [run.said(process) for process in range(processes)]
    assert all(one == said[0] for one in said), "a step's loss is that of all devices, everywhere"
    return folder, said[0]


@pytest.mark.parametrize(("processes", "strategy"), CASES)
def test_several_processes_equal_one(processes, strategy, several):
    """Images and videos, of which each process has its own only; gradients, sums and what the loss reads beside them (a
    reference, whole responses), then the losses of steps; float32."""
    folder, losses = several(processes)
    config = host_cases.settings(strategy, processes)
    composed = {seed: host_cases.composer(config).compose(*random_groups(seed)) for seed in SEEDS}
    recorded = host_cases.Recorded(config, composed, mesh=make_mesh(DEVICES))
    for seed in SEEDS:
        composition = recorded.composition(seed)
        grads, tally = recorded.learner.accumulate(composition.microbatches)
        found = np.load(folder / f"{strategy}{seed}.npz")
        for i, want in enumerate(jax.tree.leaves(grads)):
            got = found[f"grad {i}"]
            np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * max(np.abs(want).max(), 1e-30))
        for name, value in tally.sums.items():
            assert found[f"sum {name}"] == pytest.approx(float(value), rel=TOLERANCE, abs=TOLERANCE)
        parts = [dict(np.load(folder / f"{strategy}{seed}-{process}.npz")) for process in range(processes)]
        for (draw, sample), want in host_cases.scores(composition).items():
            # Tokens of a response that several processes compute lie in the order of these.
            halves = [np.split(part[f"{draw} {sample}"], 2) for part in parts if f"{draw} {sample}" in part]
            got = np.concatenate([half[k] for k in range(2) for half in halves])
            np.testing.assert_allclose(got, want, rtol=0, atol=5 * TOLERANCE)
    np.testing.assert_allclose(losses[strategy], recorded.losses(STEPS), rtol=1e-4, atol=1e-4)
