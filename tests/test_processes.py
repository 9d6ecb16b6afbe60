"""Training over several real processes on this machine equals one process with as many devices."""

import functools
import os

import host_cases
import jax
import numpy as np
import pytest
from host_cases import DEVICES, FEATURES, SEEDS, STRATEGIES
from learner_cases import TOLERANCE
from process_cases import Processes
from turns import has_come

from sharding.mesh import make_mesh

STEPS = int(
    os.environ.get("FLUXJAX_RECORDED_STEPS", "3")
)  # with 50, every feature under every strategy, over four, too
TURNS = [  # of each, what so many processes train
    {2: [("fsdp", "rewarded"), ("hybrid", "coupled"), ("fsdp", "states")]},
    {4: [("ulysses", "plain")]},
    {2: [("flex_ulysses", "critic"), ("odc", "early")]},
]
if STEPS >= 50:
    EVERY = [(strategy, feature) for strategy in STRATEGIES for feature in FEATURES]
    TURNS = [{2: EVERY, 4: EVERY}]
CASES = [
    pytest.param(processes, strategy, feature, marks=pytest.mark.turn(turn))
    for turn, tried in enumerate(TURNS)
    for processes, cases in tried.items()
    for strategy, feature in cases
]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """(folder, metrics) of so many processes: what they wrote, and what process 0 said of all steps."""
    return functools.cache(functools.partial(trained, tmp_path_factory))


def trained(tmp_path_factory, processes):
    folder = tmp_path_factory.mktemp("several")
    coming = [tried for turn, tried in enumerate(TURNS) if has_come(turn)]
    cases = [case for tried in coming for case in tried.get(processes, [])]
    settings = {"devices": DEVICES // processes, "cases": cases, "steps": STEPS, "out": str(folder)}
    with Processes("host_process.py", folder, [{}] * processes, **settings) as run:
        assert run.ends(1500) == [0] * processes, "".join(map(run.errors, range(processes)))
        return folder, run.said(0)


@pytest.mark.medium
@pytest.mark.parametrize(("processes", "strategy", "feature"), CASES)
def test_several_processes_equal_one(processes, strategy, feature, several):
    """Images and videos, of which each process has its own only. Gradients, sums and what the losses read beside them
    (a reference, whole responses, what process 0 decided of all of them), then the metrics of steps; float32."""
    folder, said = several(processes)
    recorded = host_cases.Recorded(strategy, feature, processes, mesh=make_mesh(DEVICES))
    for seed in SEEDS:
        for number, composition in enumerate(recorded.composed(seed)):
            name = f"{strategy}-{feature}-{seed}-{number}"
            for of, (grads, tally) in enumerate(recorded.results(composition)):
                found = np.load(folder / f"{name}-{of}.npz")
                for i, want in enumerate(jax.tree.leaves(grads)):
                    got, scale = found[f"grad {i}"], max(np.abs(want).max(), 1e-30)
                    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * scale)
                for sum_of, value in tally.sums.items():
                    assert found[f"sum {sum_of}"] == pytest.approx(float(value), rel=TOLERANCE, abs=TOLERANCE)
            parts = [dict(np.load(folder / f"{name}-of-{process}.npz")) for process in range(processes)]
            for (draw, sample), want in host_cases.scores(composition).items():
                # Tokens of a response that several processes compute lie in the order of these.
                got = np.concatenate([part[f"{draw} {sample}"] for part in parts if f"{draw} {sample}" in part], axis=1)
                np.testing.assert_allclose(got, want, rtol=0, atol=5 * TOLERANCE)
    wanted = recorded.steps(STEPS)
    for step, (got, want) in enumerate(zip(said[f"{strategy}-{feature}"], wanted, strict=True)):
        assert got.keys() == want.keys()
        for name in want.keys() - {"seconds/idle"}:
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-4), (step, name)
