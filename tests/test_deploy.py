"""The files of `deploy/` fit their schemas, and start `fluxjax.train` with arguments that it takes."""

import json
import os
import pathlib
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml

from fluxjax.config import Config, RolloutEngine, cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
SCHEMAS = json.loads((ROOT / "tests" / "deploy_schema.json").read_text())
JOBSET: dict[str, Any] = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
SKYPILOT: dict[str, Any] = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
JOBS = {job["name"]: job["template"]["spec"] for job in JOBSET["spec"]["replicatedJobs"]}
SECRET = "0123"


def check(manifest: dict[str, Any], kind: str) -> None:
    jsonschema.validate(manifest, {"$ref": f"#/$defs/{kind}", "$defs": SCHEMAS["$defs"]})


@pytest.mark.parametrize(("manifest", "kind"), [(JOBSET, "jobset"), (SKYPILOT, "skypilot")])
def test_manifests_fit_their_schema(manifest, kind):
    check(manifest, kind)
    for field in ("spec", "resources"):
        if field in manifest:
            with pytest.raises(jsonschema.ValidationError, match="replicated_jobs"):
                check(manifest | {field: manifest[field] | {"replicated_jobs": []}}, kind)


@pytest.mark.parametrize("script", ["slurm.sbatch", "serve.sh"])
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", DEPLOY / script], check=True)


def container(job: str) -> dict[str, Any]:
    (found,) = JOBS[job]["template"]["spec"]["containers"]
    return found


def parsed(command: list[str]) -> Config:
    """As the program that the command starts would read it."""
    assert command[1:3] == ["-m", "fluxjax.train"]
    return cli.load(command[3:])


@pytest.mark.parametrize("pod", [0, 1])
def test_pods_of_a_job_set_are_processes(pod):
    words = [word.replace("$(JOB_COMPLETION_INDEX)", str(pod)) for word in container("trainer")["command"]]
    config = parsed(words)
    trainers, servers = JOBS["trainer"], JOBS["rollout"]
    assert (config.distributed.processes, config.distributed.process) == (trainers["parallelism"], pod)
    assert trainers["completions"] == trainers["parallelism"] and trainers["completionMode"] == "Indexed"
    name = JOBSET["metadata"]["name"]
    assert config.distributed.coordinator.startswith(f"{name}-trainer-0-0.{name}:")
    hosts = [f"{name}-rollout-0-{index}.{name}" for index in range(servers["parallelism"])]
    port = container("rollout")["command"][3]
    assert config.servers.addresses == tuple(f"http://{host}:{port}" for host in hosts)
    assert container("rollout")["command"][2] == config.model.path


def test_targets_and_volumes_of_a_job_set_exist():
    rules = [JOBSET["spec"]["successPolicy"], *JOBSET["spec"]["failurePolicy"]["rules"]]
    assert {target for rule in rules for target in rule["targetReplicatedJobs"]} <= JOBS.keys()
    for name, job in JOBS.items():
        volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container(name)["volumeMounts"]} == volumes


# --- scripts, run with programs that only say how they were called -----------------------------------


def program(file: pathlib.Path, text: str) -> pathlib.Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/usr/bin/env bash\n{text}\n")
    file.chmod(0o755)
    return file


def says(folder: pathlib.Path) -> str:
    """The text of a program that writes down its words, a line each, in a file of its own."""
    return f'printf "%s\\n" "$0" "$@" >"{folder}/called.$$"'


def calls(folder: pathlib.Path) -> list[list[str]]:
    return [file.read_text().splitlines() for file in folder.glob("called.*")]


def trainer_call(folder: pathlib.Path) -> list[str]:
    (call,) = (call for call in calls(folder) if "fluxjax.train" in call)
    return call


def run(script: list[str | pathlib.Path], folder: pathlib.Path, **environment: str) -> None:
    path = f"{folder}/bin:{os.environ['PATH']}"
    env = {"PATH": path} | environment
    done = subprocess.run(script, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("nodes", "servers"), [("a b c", ("a",)), ("a", ("a",))])
def test_a_job_of_slurm_starts_servers_and_trainers(nodes, servers, tmp_path):
    program(tmp_path / "bin" / "scontrol", f"printf '%s\\n' {nodes}")
    step = f'printf "%s\\n" srun "$@" >"{tmp_path}/step.$$"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"'
    program(tmp_path / "bin" / "srun", step)
    python = program(tmp_path / "bin" / "python", says(tmp_path))
    (tmp_path / "deploy").symlink_to(DEPLOY)
    given = {"CHECKPOINT": "model", "RUN_DIR": "runs/x", "PYTHON": str(python), "SLURM_JOB_NODELIST": "..."}
    command = ["bash", DEPLOY / "slurm.sbatch", "--config=configs/vlm.py", "--config.steps=7"]
    run(command, tmp_path, SLURM_JOB_ID="1005", SLURM_GPUS_PER_NODE="8", **given)
    config = parsed(trainer_call(tmp_path))
    assert config.servers.addresses == tuple(f"http://{server}:30005" for server in servers)
    assert (config.steps, config.run_dir, config.rollout.engine) == (7, "runs/x", RolloutEngine.SGLANG)
    assert config.distributed.processes == 0, "found by Slurm"
    steps = [file.read_text().splitlines() for file in tmp_path.glob("step.*")]
    (trainers,) = (step for step in steps if "fluxjax.train" in step)
    count = max(len(nodes.split()) - len(servers), 1)
    assert f"--ntasks={count}" in trainers and f"--nodelist={','.join(nodes.split()[-count:])}" in trainers


def on_node(node: int, folder: pathlib.Path, **more: str) -> None:
    """Runs what SkyPilot would on one of three nodes."""
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3", "SKYPILOT_NUM_NODES": "3"}
    nodes |= {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "1"}
    nodes |= {"RUN_DIR": str(folder / "run")}
    run(["bash", "-c", SKYPILOT["run"]], folder, **SKYPILOT["envs"] | nodes | more)


@pytest.mark.parametrize("node", [0, 1])
def test_nodes_of_skypilot_are_processes(node, tmp_path):
    program(tmp_path / ".venv" / "bin" / "python", says(tmp_path))
    on_node(node, tmp_path)
    config = parsed(trainer_call(tmp_path))
    assert (config.distributed.processes, config.distributed.process) == (2, node)
    assert config.distributed.coordinator == "10.0.0.1:61440"
    assert config.servers.addresses == ("http://10.0.0.3:30000",)
    assert (tmp_path / "run.1.ended").exists() == (node == 0), "what servers wait for"


def test_a_node_of_skypilot_serves_until_training_has_ended(tmp_path):
    program(tmp_path / ".sglang" / "bin" / "python", says(tmp_path) + "\nexec sleep 60")
    (tmp_path / "deploy").symlink_to(DEPLOY)
    program(tmp_path / "bin" / "sleep", f'touch "{tmp_path}/run.1.ended"\nexec /bin/sleep 1')
    on_node(2, tmp_path, FLUXJAX_TOKEN=SECRET)
    (call,) = calls(tmp_path)
    assert call[1:3] == ["-m", "sglang.launch_server"] and call[call.index("--api-key") + 1] == SECRET
    assert call[call.index("--model-path") + 1] == SKYPILOT["envs"]["CHECKPOINT"]
    assert call[call.index("--tp-size") + 1] == "8"


def test_a_server_without_a_token_does_not_start(tmp_path):
    command, env = ["bash", DEPLOY / "serve.sh", "model", "1"], {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=env, capture_output=True)
    assert done.returncode and b"FLUXJAX_TOKEN" in done.stderr
