"""`python -m fluxjax.launch`: one run over several real processes, on images and videos."""

import contextlib
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from forked import SERVER
from fuzz.checkpoint import flipped, largest_file
from process_cases import free_port, until
from run_cases import Commands, as_if_killed, ended, logged, trained
from safetensors.numpy import load_file

from fluxjax import launch
from fluxjax.base.errors import LOST
from fluxjax.config import Config, ConfigError, DistributedConfig, cli
from fluxjax.hosts.gang import ALONE_ONLY, check_across_processes
from fluxjax.hosts.start import found
from fluxjax.report.metrics import read

CONFIG = "configs/vlm.py:debug"
SMALL = [
    "--config.warm_start.steps=3",
    "--config.steps=3",
    "--config.evaluation.samples=4",
    "--config.checkpoint.every=1",
    "--config.rollout.prompts_per_step=6",
    "--config.algorithm.name=gspo",  # with ratios of whole responses, before each of several optimizer steps
    "--config.algorithm.minibatches=2",
    "--config.algorithm.epochs=2",
    "--config.lora.rank=4",
]


@pytest.fixture(scope="module")
def scraped(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[str]]:
    """A run over two processes, undisturbed, and what the Prometheus port of each said last."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    port, pages = two_free_ports(), ["", ""]
    arguments = [*SMALL, f"--config.report.prometheus={port}"]
    process = commands.start(run_dir, CONFIG, arguments, processes=2)
    with ended(process):
        end = time.monotonic() + 540
        while process.poll() is None and time.monotonic() < end:
            for number in range(2):
                with (
                    contextlib.suppress(OSError),  # it has not begun, or has ended
                    urllib.request.urlopen(f"http://127.0.0.1:{port + number}/metrics", timeout=5) as reply,
                ):
                    pages[number] = reply.read().decode()
            time.sleep(0.1)
    assert process.returncode == 0, (run_dir.parent / "run.log").read_text()[-4000:]
    return run_dir, pages


@pytest.fixture(scope="module")
def two(scraped: tuple[pathlib.Path, list[str]]) -> pathlib.Path:
    return scraped[0]


def two_free_ports() -> int:
    """The first of two neighbours."""
    while True:
        with socket.socket() as second, contextlib.suppress(OSError, OverflowError):
            second.bind(("127.0.0.1", (port := free_port()) + 1))
            return port


def weights(run_dir: pathlib.Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in load_file(run_dir / "model" / "model.safetensors").items()}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The run in one process with two devices."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    trained(run_dir, CONFIG, [*SMALL, "--config.sharding.devices=2"])
    return run_dir


@pytest.mark.long
def test_two_processes_train_as_one(one, two):
    """The same losses as one process with as many devices, warm start and RL; float32."""
    kept = ("loss", "grad_norm", "reward/mean", "packing/microbatches", "packing/token_fill", "packing/patch_fill")
    found, want = (
        {(line["phase"], line["step"]): line for line in read(run_dir / "metrics.jsonl")} for run_dir in (two, one)
    )
    assert found.keys() == want.keys()
    assert sum("loss" in line for line in want.values()) == 6
    for key, line in want.items():
        for name in kept:
            if name in line:
                assert found[key][name] == pytest.approx(line[name], rel=1e-4, abs=1e-5), (key, name)
    assert_same_weights(two, one)


def assert_same_weights(run_dir: pathlib.Path, one: pathlib.Path) -> None:
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        found = load_file(run_dir / file)
        for name, tensor in load_file(one / file).items():
            assert file.startswith("model") or np.abs(tensor).max() > 0, "one of two adapters began with zeros"
            np.testing.assert_allclose(found[name], tensor, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.turn(0)
def test_two_processes_go_on_from_where_one_was(commands, one, tmp_path):
    """Its newest checkpoint is damaged: both take the one before."""
    joined = as_if_killed(one, tmp_path / "joined", 3)
    damaged = largest_file(joined / "checkpoints" / "3")
    flipped(damaged, random.Random(0))
    text = commands.run(joined, CONFIG, SMALL, processes=2)
    assert "resuming after step 2" in text and re.search(rf"step 3 .* is passed over: .*{damaged.name}", text)
    assert_same_weights(joined, one)


def failed(commands, run_dir, arguments, launch, when, number, victim) -> str:
    """Sends a signal to one of two processes. All have ended in 30 s, and are started again; returns the output."""
    process = commands.start(run_dir, CONFIG, arguments, processes=2, launch=launch)
    with ended(process):
        until(lambda: when() or process.poll() is not None, 540)
        first = children(process.pid)
        os.kill(first[victim], number)
        until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in first), 30)
        status = process.wait(300)
    text = (run_dir.parent / "run.log").read_text()
    assert status == 0, text[-4000:]
    how = {signal.SIGKILL: "was ended by SIGKILL", signal.SIGSTOP: "was stopped, or did not end with the others"}
    assert f"process {victim} {how[number]}; all processes have ended" in text
    survivor = text if victim else (run_dir.parent / "run.process-1.log").read_text()
    told = [line for line in survivor.splitlines() if f"process {victim} (" in line and "is lost" in line]
    why = "it has not answered for 15 s" if number == signal.SIGSTOP else "its connection closed"
    assert len(told) == 1 and f"is lost: {why}" in told[0]
    return text


@pytest.mark.long
@pytest.mark.turn(1)
def test_one_goes_on_from_a_checkpoint_where_the_other_died(commands, two, tmp_path):
    """It learns what two would have."""
    run_dir = tmp_path / "run"
    text = failed(commands, run_dir, SMALL, ["--processes=2,1"], logged(run_dir, "rl", 2), signal.SIGKILL, 1)
    assert re.search(r"attempt 2 goes on from the checkpoint of step \d\n", text) and "resuming after step" in text
    found, want = (
        {line["step"]: line["loss"] for line in read(folder / "metrics.jsonl") if line["phase"] == "rl"}
        for folder in (run_dir, two)
    )
    assert found == pytest.approx(want, rel=1e-3, abs=1e-4) and len(found) == 3


@pytest.mark.long
@pytest.mark.turn(2)
def test_a_gang_goes_on_from_its_checkpoint_where_one_froze(commands, two, tmp_path):
    """It ends bit for bit as the one that was left alone."""
    run_dir = tmp_path / "run"
    text = failed(commands, run_dir, SMALL, [], logged(run_dir, "rl", 2), signal.SIGSTOP, 0)
    assert re.search(r"attempt 2 goes on from the checkpoint of step \d\n", text) and "resuming after step" in text
    assert weights(run_dir) == weights(two)


@pytest.mark.medium
def test_a_process_that_is_stopped_before_it_has_come_is_named(commands, tmp_path):
    process = commands.start(tmp_path / "run", CONFIG, SMALL, processes=2, launch=["--restarts=0"])
    with ended(process):
        until(lambda: sum(map(has_begun, children(process.pid))) == 2)
        os.kill(children(process.pid)[1], signal.SIGSTOP)
        assert process.wait(30) == 128 + signal.SIGKILL
    assert "process 1 was stopped, or did not end with the others" in (tmp_path / "run.log").read_text()


def alone(folder, number, port, **settings) -> list[str]:
    """The command of one of two processes."""
    place = {"coordinator": f"127.0.0.1:{port}", "processes": 2, "process": number} | settings
    distributed = [f"--config.distributed.{name}={value}" for name, value in place.items()]
    command = [f"--config={CONFIG}", *SMALL, f"--config.run_dir={folder / 'run'}", *distributed]
    return [sys.executable, "-m", "fluxjax.train", *command]


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1])
def test_a_process_that_does_not_come_is_waited_for_so_long(commands, missing, tmp_path):
    """Also where JAX would wait for longer, and end with a stack trace."""
    command = alone(tmp_path, 1 - missing, free_port(), progress_timeout=2)
    run = subprocess.run(command, env=commands.env, capture_output=True, text=True, timeout=60)
    assert run.returncode == LOST
    assert "has waited 2 s for the other processes" in run.stderr and "stack trace" not in run.stderr


@pytest.mark.long
def test_a_process_that_is_stopped_before_the_links_are_up_is_waited_for_so_long(commands, tmp_path):
    """As the two meet, without a supervisor: the other one ends by itself."""
    port, processes = free_port(), []
    with contextlib.ExitStack() as stack:
        for number in range(2):
            errors = stack.enter_context((tmp_path / f"errors{number}").open("w"))
            command = alone(tmp_path, number, port, progress_timeout=20)
            process = subprocess.Popen(command, env=commands.env, stderr=errors, stdout=errors)
            processes.append(stack.enter_context(ended(process)))
        until(lambda: connected(port), pause=0.001)
        processes[1].send_signal(signal.SIGSTOP)
        assert processes[0].wait(90) == LOST
    text = (tmp_path / "errors0").read_text()
    assert "has waited" in text or "is lost" in text, text


def connected(port: int) -> bool:
    """Whether there is a connection to this port of loopback."""
    lines = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(words[2].endswith(f":{port:04X}") and words[3] == "01" for words in map(str.split, lines))


def children(parent: int) -> list[int]:
    """Process ids, in the order in which they were started; not that of the process which forks them for the test."""
    found = map(int, pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return [pid for pid in found if pathlib.Path(f"/proc/{pid}/comm").read_text() != f"{SERVER}\n"]


def has_begun(pid: int) -> bool:
    """Whether it runs a program of its own: one that is stopped between `vfork` and `exec` holds up its parent."""
    return b"fluxjax.launch" not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.long
def test_every_process_is_seen(scraped):
    """A line each on the display, a log, a Prometheus port, and its part of a step's record."""
    run_dir, pages = scraped
    text = (run_dir.parent / "run.log").read_text()
    for process in range(2):
        assert f"process {process} ({socket.gethostname()}) | devices 1 | memory" in text
        lines = (run_dir / "processes" / f"process-{process}.log").read_text().splitlines()
        assert f"process {process} of 2" in lines[0] and lines[-1].endswith("the run is over")
        assert sum(": step " in line for line in lines) == 6, "3 of the warm start and 3 of RL"
        assert f'process="{process}"' in pages[0] and "process_resident_memory_bytes" in pages[process]
    assert "fluxjax_loss" in pages[0] and "fluxjax_hosts_bytes_told" in pages[0]
    for engine in range(2):  # one in each process, and both have generated
        (tokens,) = re.findall(rf'fluxjax_server_tokens_total{{server="server {engine}"}} (\S+)', pages[0])
        assert float(tokens) > 0
    assert 'process="1"' in pages[1] and 'process="0"' not in pages[1]
    assert "INFO" not in text, "the terminal is for the display"
    steps = [record for record in read(run_dir / "metrics.jsonl") if record["phase"] == "rl"]
    assert len(steps) == 3
    for record in steps:
        assert [host["process"] for host in record["hosts"]] == [0, 1]
        assert all(host["devices"] == 1 and host["memory_bytes"] > 1e8 for host in record["hosts"])
        assert all(host["train_seconds"] > 0 and host["prepare_seconds"] > 0 for host in record["hosts"])
        assert record["hosts/slowest"] in (0, 1) and 100 < record["hosts/bytes_told"] < 100_000


def test_what_several_processes_cannot_do_is_refused_by_name():
    check_across_processes(cli.load([]))
    for flag in ("stream_trainer=True", "parallelism.min_degree=1", "sharding.devices=1"):
        with pytest.raises(ConfigError, match=re.escape(flag.partition("=")[0])):
            check_across_processes(cli.load([f"--config.{flag}"]))
    assert len(ALONE_ONLY) == 2, "all else that one process can"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("gpu[001-004,007],b", "gpu001"), ("n[9,11]", "n9"), ("rack[2-3]node1", "rack2node1")],
)
def test_tasks_of_slurm_find_each_other(nodes, host):
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": nodes}
    each = [found(DistributedConfig(), slurm | {"SLURM_PROCID": str(task)}) for task in range(4)]
    assert [one.process for one in each] == [0, 1, 2, 3]
    assert {one.coordinator for one in each} == {f"{host}:{61440 + 77 * 16 + 1}"} and each[0].processes == 4
    for one in each:
        config = Config(distributed=one)
        config.data = cli.load(["--config=configs/vlm.py"]).data
        config.validate()


URI = "OMPI_MCA_orte_hnp_uri"
MPIRUN = {  # as recorded: what `mpirun -n 2` of each release leaves in the environment, and where it was started
    "4.1.4": ({URI: "1747517440.0;tcp://192.0.2.2:42975;tcp6://[fd00::2]:47013"}, "192.0.2.2:63529"),
    "4.1.4, IPv6 only": ({URI: "1747517440.0;tcp6://[fd00::2,fd00::3]:47013"}, "[fd00::2]:63529"),
    "5.0.11": ({"PMIX_NAMESPACE": "prterun-gpu-7-1435@1", "PMIX_HOSTNAME": "gpu-8"}, "gpu-7:62875"),
}


@pytest.mark.parametrize("release", MPIRUN)
def test_ranks_of_open_mpi_find_each_other(release):
    """Also in an allocation of Slurm, where the daemons of `mpirun` are the tasks."""
    said, coordinator = MPIRUN[release]
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "3"}
    for rank in (0, 1):
        environment = slurm | said | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank)}
        place = found(DistributedConfig(progress_timeout=7.0), environment)
        assert place == DistributedConfig(coordinator, 2, rank, progress_timeout=7.0)
    assert found(DistributedConfig(), said | {"OMPI_COMM_WORLD_SIZE": "1"}).processes == 1
    with pytest.raises(ConfigError, match=r"set distributed\.coordinator"):  # where it does not say where it is
        found(DistributedConfig(), {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})


def test_what_is_given_counts_and_one_task_is_one_process():
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "2"}
    given = DistributedConfig(coordinator="b:1", processes=2, process=1)
    assert found(given, slurm) is given
    assert found(DistributedConfig(), {}).processes == 1
    assert found(DistributedConfig(), slurm | {"SLURM_STEP_NUM_TASKS": "1"}).processes == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--processes", "0", "--", "--config=configs/vlm.py"], "--processes is 0"),
        (["--processes", "2"], "nothing to train"),
        (["--", "--config=configs/vlm.py"], "--processes"),
        (["--processes", "2,0", "--", "--config=configs/vlm.py"], "--processes is 0"),
        (["--processes", "2", "--", "--config=configs/vlm.py", "--config.steps=many"], "config.steps"),
    ],
)
def test_a_command_that_starts_nothing_says_why(arguments, says, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(launch.main(arguments))
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """Runs a supervisor whose attempts end as told: (statuses of the processes, whether there is a new checkpoint)."""
    made: list[int] = []

    def run(attempts, processes=(2,), restarts=1):
        left = iter(attempts)

        def attempt(self, count):
            made.append(count)
            statuses, saved = next(left)
            if saved:
                (tmp_path / "run" / "checkpoints" / str(len(made))).mkdir(parents=True)
            failed = {process: status for process, status in enumerate(statuses) if status}
            return launch.Failure(failed) if failed else None

        monkeypatch.setattr(launch.Supervisor, "_attempt", attempt)
        return launch.Supervisor(processes, restarts, [], tmp_path / "run").run(), made

    return run


def test_a_run_is_started_again_while_it_comes_further(scripted):
    failed = [([0, -9], True), ([3, 1], True), ([1, 3], False), ([0, -9], True)]
    assert scripted([*failed, ([0, 0], False)], processes=(4, 3)) == (0, [4, 3, 3, 3, 3])


def test_a_run_that_comes_no_further_ends(scripted, capsys):
    assert scripted([([0, -9], False)] * 5, restarts=2) == (137, [2, 2, 2])
    assert "3 attempts in a row ended without a new checkpoint" in capsys.readouterr().err


def test_who_failed_is_named_not_who_noticed():
    assert str(launch.Failure({0: 3, 2: -9})) == "process 2 was ended by SIGKILL"
    assert str(launch.Failure({0: 1, 1: -9})) == "process 1 was ended by SIGKILL"
    assert str(launch.Failure({1: 3, 0: 1})) == "process 0 ended with 1"
    assert str(launch.Failure({1: -9, 0: -9}, frozen=[0])) == "process 1 was ended by SIGKILL"
    assert launch.Failure({0: -9, 1: -9}, frozen=[1, 0]).process == 1
    assert str(launch.Failure({0: 3, 1: -9}, frozen=[1])) == "process 1 was stopped, or did not end with the others"
    assert str(launch.Failure({0: 3})) == "process 0 ended with 3" and launch.Failure({0: 3}).status == 3


def test_a_signal_between_two_attempts_is_not_lost(scripted, monkeypatch):
    monkeypatch.setattr(launch.Supervisor, "_newest", lambda self: self.stop(signal.SIGTERM))
    assert scripted([([0, -9], True)] * 3) == (137, [2])


def test_two_signals_have_the_status_of_shells_whichever_process_ends_first(scripted, monkeypatch):
    monkeypatch.setattr(launch.Supervisor, "_newest", lambda self: [self.stop(signal.SIGINT) for _ in "12"])
    assert scripted([([0, 1], True)] * 3) == (130, [2])


def test_what_the_user_must_mend_is_not_tried_again(scripted):
    assert scripted([([3, 2], True)]) == (2, [2])
