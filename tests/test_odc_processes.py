"""ODC across two real processes on loopback: a death in mid-minibatch ends both. `test_processes` has its results."""

import signal

import pytest
from process_cases import Processes

WORKER = "odc_process.py"
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Where four steps of training end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Processes(WORKER, folder, [{}, {}], devices=1, steps=4, checkpoints=str(folder / "c")) as run:
        assert run.ends() == [0, 0], run.errors(0) + run.errors(1)
        return run.said(0)["norms"]


@pytest.mark.parametrize(
    ("fault", "victim", "says"),
    [
        ("kill", 0, "process 0 "),
        ("kill", 1, "process 1 "),
        ("stop", 1, "process 1 "),
        ("raise", 1, ", layers[1] backward: MemoryError: no room for 3 GB"),
    ],
)
def test_a_fault_in_mid_minibatch_ends_all_and_the_run_resumes(fault, victim, says, undisturbed, tmp_path):
    own = [{}, {}]
    own[victim] = {"fault": fault, "fault_step": 3}
    settings = {"devices": 1, "steps": 4, "checkpoints": str(tmp_path / "c")}
    timeout = 20.0 if fault == "stop" else 90.0  # only a stopped process is noticed by its silence
    with Processes(WORKER, tmp_path, own, timeout=timeout, **settings) as run:
        survivor = run.processes[1 - victim]
        if fault == "kill":
            assert run.processes[victim].wait(240) == -signal.SIGKILL
        assert survivor.wait(240) > 0
        if fault == "raise":
            assert run.processes[victim].wait(240) > 0
            assert len([line for line in run.errors(victim).splitlines() if says in line]) == 1
        lines = [line for line in run.errors(1 - victim).splitlines() if says in line]
        assert len(lines) == 1, run.errors(1 - victim)
        why = {"kill": " is lost: its connection closed", "stop": " is lost: it has not answered for 20 s", "raise": ""}
        assert why[fault] in lines[0] and "goes on from its last checkpoint" in lines[0]
        assert "Traceback" not in run.errors(1 - victim)
    again = tmp_path / "again"
    again.mkdir()
    with Processes(WORKER, again, [{}, {}], **settings) as run:
        assert run.ends() == [0, 0], run.errors(0) + run.errors(1)
        assert run.said(0)["resumed_from"] == 2
        assert run.said(0)["norms"] == undisturbed
