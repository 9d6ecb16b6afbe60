"""A text run on one device imports none of the rooms that it does not enter."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = (  # by the beginning of their files' names
    "fluxjax/algorithms/dpo",
    "fluxjax/algorithms/ppo",
    "fluxjax/batch/own_pace",
    "fluxjax/batch/spreading",
    "fluxjax/coordinator/policies/adaptive_async",
    "fluxjax/coordinator/policies/april",
    "fluxjax/coordinator/policies/early_training",
    "fluxjax/coordinator/policies/tail_batching",
    "fluxjax/data/flight_",
    "fluxjax/data/local_store",
    "fluxjax/data/media_cache",
    "fluxjax/data/shadows",
    "fluxjax/environments/",
    "fluxjax/hosts/start",
    "fluxjax/learner/critic",
    "fluxjax/learner/replay",
    "fluxjax/rewards/calls",
    "fluxjax/rewards/code",
    "fluxjax/rewards/judge/",
    "fluxjax/rewards/sandbox/",
    "fluxjax/run/follower",
    "fluxjax/runtime/fleet_pool",
    "fluxjax/runtime/flight_store",
    "fluxjax/runtime/places",
    "fluxjax/runtime/preprocessors",
    "fluxjax/simulation/",
    "fluxjax/sizing/check",
    "models/lora",
    "models/processing/videos",
    "models/qwen2_5_vl/modeling",
    "rollout/fleet",
    "rollout/serve",
    "rollout/sglang",
    "rollout/streamed",
    "rollout/weights/routes",
    "sharding/odc/executor",
    "sharding/planner/flex",
    "sharding/spread/ulysses",
)


@pytest.mark.slow
def test_a_text_run_imports_only_the_rooms_that_it_enters():
    flags = ["--config=configs/text.py:debug", "--config.steps=1", "--config.warm_start.steps=0"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    command = [sys.executable, str(ROOT / "scripts" / "budgets.py"), "--run", *flags]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    imported = json.loads(done.stdout.splitlines()[-1])["imported"]
    assert "fluxjax/run/trainer.py" in imported
    entered = [file for file in imported if any(file.startswith(room) for room in ROOMS)]
    assert not entered
    assert len(imported) <= 200


@pytest.mark.medium
def test_every_room_of_the_list_has_files():
    files = [str(file.relative_to(ROOT)) for file in ROOT.glob("*/**/*.py")]
    assert [room for room in ROOMS if not any(file.startswith(room) for file in files)] == []
