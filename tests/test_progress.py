"""A process that lives and comes no further ends all, by name; one that compiles is let be."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from process_cases import Processes

from fluxjax.base.timeline import compilations

LIMIT = 4.0  # seconds; above the time after which a compilation is announced


@pytest.mark.long
def test_a_process_that_is_stuck_ends_both_by_name(tmp_path):
    began = time.monotonic()
    with Processes("progress_process.py", tmp_path, [{}, {}], fault="stuck", limit=LIMIT) as run:
        assert all(status not in (0, None) for status in run.ends(60))
    assert time.monotonic() < began + 50
    says = "process 1 (", "has made no progress for 4 s, at step 1, media"
    for process in range(2):
        lines = [line for line in run.errors(process).splitlines() if all(words in line for words in says)]
        assert len(lines) == 1, run.errors(process)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["", "compiles"])
def test_who_compiles_is_waited_for(fault, tmp_path):
    with Processes("progress_process.py", tmp_path, [{}, {}], fault=fault, limit=LIMIT) as run:
        assert run.ends(90) == [0, 0], run.errors(0) + run.errors(1)


def test_compilations_are_counted_as_jax_says_them():
    """If another release of JAX gave these events other names, no compilation would be announced."""
    counted, seen = compilations(), []

    @jax.jit
    def program(x):
        return jnp.tanh(x) * 3.25

    jax.monitoring.register_event_listener(lambda *_, **__: seen.append(counted.under_way))
    program(np.ones(7, np.float32))
    assert max(seen) == 1 and counted.under_way == 0
