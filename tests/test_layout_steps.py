"""No layout of a training step changes where it leads: metrics, advantages and weights are those of one row."""

import numpy as np
import pytest
from step_cases import flat, key_of, samples_of, trained

# Each loss has a case that spreads sequences and one of ODC; importance weights, minibatches and epochs have a case of
# each strategy between them. `test_dpo` has the gradients of dpo, whose loss is of pairs.
PAIRS = [
    ("grpo twice", "odc"),
    ("token weights twice", "fsdp"),
    ("response weights", "flex_ulysses"),
    ("gspo twice", "flex_ulysses"),
    ("gspo twice", "odc"),
    ("ppo twice", "flex_ulysses"),
    ("ppo twice", "odc"),
]
EARLY = [("token weights twice", "fsdp"), ("gspo twice", "flex_ulysses")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"), [pytest.param(*pair, marks=() if pair in EARLY else pytest.mark.long) for pair in PAIRS]
)
def test_no_layout_changes_a_step(case, layout):
    (want, alone, critic), (got, spread, spread_critic) = trained(case), trained(case, layout)
    same = [key for key in want.metrics if not key.startswith(("packing/", "sharding/"))]
    assert {k: got.metrics[k] for k in same} == pytest.approx({k: want.metrics[k] for k in same}, rel=1e-4, abs=1e-5)
    tolerance = 2e-6 if "twice" in case else 1e-6
    np.testing.assert_allclose(flat(spread), flat(alone), rtol=0, atol=tolerance)
    if critic is not None:
        assert {"critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/clip_fraction"} <= set(same)
        np.testing.assert_allclose(flat(spread_critic), flat(critic), rtol=0, atol=tolerance)
    given = {key_of(sample): sample.advantage for sample in samples_of(want.groups)}
    assert {key_of(s): s.advantage for s in samples_of(got.groups)} == pytest.approx(given, abs=1e-4)
