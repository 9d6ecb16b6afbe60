"""Training over several real processes on this machine equals one process with as many devices."""

import jax
import numpy as np
import pytest
from learner_cases import TOLERANCE, learner, outcome, random_groups
from packing_cases import MODEL, compose, make_config
from process_cases import Processes

SEEDS = [3, 8, 11]
pytestmark = pytest.mark.long


@pytest.mark.parametrize("processes", [2, 4])
def test_each_lays_out_its_own_rows_from_its_own_media(processes, tmp_path):
    """Images and videos, of which each process has its own only; loss, gradients and log-probs, in float32."""
    settings = {"devices": 4 // processes, "seeds": SEEDS, "out": str(tmp_path)}
    with Processes("host_process.py", tmp_path, [{}] * processes, **settings) as run:
        assert run.ends() == [0] * processes, "".join(map(run.errors, range(processes)))
    idle = 0
    for seed in SEEDS:
        groups, prepared = random_groups(seed)
        composition = compose(groups, prepared, make_config(tokens_per_row=64, rows=2), 4, vision=MODEL.vision)
        tally, grads, scores = outcome(learner((4, 2), 4), composition)
        found = np.load(tmp_path / f"step{seed}.npz")
        for i, want in enumerate(jax.tree.leaves(grads)):
            got = found[f"grad {i}"]
            np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * max(np.abs(want).max(), 1e-30))
        for name, value in tally.sums.items():
            assert found[f"sum {name}"] == pytest.approx(float(value), rel=TOLERANCE, abs=TOLERANCE)
        parts = [dict(np.load(tmp_path / f"scores{seed}-{process}.npz")) for process in range(processes)]
        idle += sum(not part for part in parts)
        assert sum(map(len, parts)) == len(scores), "each response is in the rows of one process"
        for (draw, sample), want in scores.items():
            (got,) = (part[f"{draw} {sample}"] for part in parts if f"{draw} {sample}" in part)
            np.testing.assert_allclose(got, want, rtol=0, atol=5 * TOLERANCE)
    assert idle, "one of these had nothing to do in a step"
