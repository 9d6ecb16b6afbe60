"""ODC across two real processes on loopback: a death in mid-minibatch ends both. `test_processes` has its results."""

import signal

import pytest
from process_cases import Processes

WORKER = "odc_process.py"
pytestmark = pytest.mark.long
SETTINGS = {"steps": 3}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fault", "victim", "says", "why"),
    [
        ("kill", 0, "process 0 ", " is lost: its connection closed"),
        ("stop", 1, "process 1 ", " is lost: it has not answered for 20 s"),
        ("raise", 1, ", layers[1] backward: MemoryError: no room for 3 GB", ""),
    ],
)
def test_a_fault_in_mid_minibatch_ends_all_and_the_run_resumes(fault, victim, says, why, tmp_path):
    own = [{}, {}]
    own[victim] = {"fault": fault, "fault_step": 2}
    timeout = 20.0 if fault == "stop" else 90.0  # only a stopped process is noticed by its silence
    checkpoints = tmp_path / "c"
    with Processes(WORKER, tmp_path, own, timeout=timeout, **SETTINGS, checkpoints=[str(checkpoints)]) as run:
        survivor = run.processes[1 - victim]
        if fault == "kill":
            assert run.processes[victim].wait(240) == -signal.SIGKILL
        assert survivor.wait(240) > 0
        if fault == "raise":
            assert run.processes[victim].wait(240) > 0
            assert len([line for line in run.errors(victim).splitlines() if says in line]) == 1
        lines = [line for line in run.errors(1 - victim).splitlines() if says in line]
        assert len(lines) == 1, run.errors(1 - victim)
        assert why in lines[0] and "goes on from its last checkpoint" in lines[0]
        assert "Traceback" not in run.errors(1 - victim)
    assert [path.name for path in checkpoints.iterdir()] == ["1"]
    if fault == "kill":  # the others leave the same behind
        (tmp_path / "again").mkdir()
        folders = [str(tmp_path / "undisturbed"), str(checkpoints)]
        with Processes(WORKER, tmp_path / "again", [{}, {}], **SETTINGS, checkpoints=folders) as run:
            assert run.ends() == [0, 0], run.errors(0) + run.errors(1)
            (begun, undisturbed), (resumed, norms) = run.said(0)["ends"]
        assert (resumed, begun) == (1, None) and norms == undisturbed
