"""Training over several real processes on this machine equals one process with as many devices."""

import host_cases
import jax
import numpy as np
import pytest
from host_cases import DEVICES, STRATEGIES
from learner_cases import TOLERANCE
from process_cases import Processes

from sharding.mesh import make_mesh

SEEDS = [3, 8, 11]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=[2, 4])
def several(request, tmp_path_factory):
    """What several processes wrote of all steps."""
    folder, processes = tmp_path_factory.mktemp("several"), request.param
    settings = {"devices": DEVICES // processes, "seeds": SEEDS, "strategies": STRATEGIES, "out": str(folder)}
    with Processes("host_process.py", folder, [{}] * processes, **settings) as run:
        assert run.ends() == [0] * processes, "".join(map(run.errors, range(processes)))
    return folder, processes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_lays_out_its_own_rows_from_its_own_media(strategy, several):
    """Images and videos, of which each process has its own only; gradients, sums and what the loss reads beside them:
    a reference, whole responses; float32."""
    folder, processes = several
    # On one device each, whatever stands between the processes.
    config = host_cases.settings(strategy, processes)
    learner = host_cases.Learner(
        config, host_cases.tiny(host_cases.HEADS), host_cases.grpo.token_loss, mesh=make_mesh(DEVICES)
    )
    for seed in SEEDS:
        groups, prepared = host_cases.groups_of(seed)
        grads, tally, composition = host_cases.gradients(learner, host_cases.composer(config).compose(groups, prepared))
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
