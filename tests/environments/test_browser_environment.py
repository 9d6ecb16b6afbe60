"""The environments of configs/qwen3_vl_8b.py:agent by their manifests: rooms of BabyAI, and web pages in Chromium."""

import asyncio
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from fluxjax.base.process_tree import descendants
from fluxjax.base.scored import Prompt
from fluxjax.config import cli
from fluxjax.environments import EnvironmentFailure, EnvironmentLimits, EnvironmentPool, Fault

pytestmark = pytest.mark.medium
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
BROWSERS = importlib.util.find_spec("miniwob") and CHROMIUM and shutil.which("chromedriver")
# Chromium is a package of the system, which neither CI nor a user's virtual environment has. The pool, the adapters and
# the manifests are tested without it.
browsing = pytest.mark.skipif(not BROWSERS, reason="needs miniwob, chromium and chromium-driver")


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("agent")
    subprocess.run([sys.executable, str(ROOT / "scripts" / "agent_manifests.py"), str(folder)], check=True)
    return folder


def records(file: pathlib.Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def by_bot(game) -> int:
    """The action that MiniGrid's own bot takes."""
    from minigrid.utils.baby_ai_bot import BabyAIBot  # pyright: ignore[reportMissingImports]

    action = BabyAIBot(game).replan()
    assert action is not None
    return int(action)


async def played(pool, source, answer, turns=(), seed=0, **more):
    """The observations of an episode with these turns, then with demonstrated ones."""
    config = cli.load(["--config=configs/qwen3_vl_8b.py:agent"]).data.sources[source]
    record = Prompt("p", source, "Do it.", answer)
    episode = await pool.start(config.environment, record, seed, config.environment_arguments | more)
    seen, said = [episode.observation], list(turns)
    while not seen[-1].done and len(seen) < 30:
        seen.append(await episode.act(said.pop(0) if said else await episode.demonstrate()))
    await episode.end()
    return seen


def test_held_out_records_differ_from_those_of_training(agent):
    for source, count in (("babyai", 2000), ("miniwob", 2080)):
        answers = {part: {r["answer"] for r in records(agent / source / f"{part}.jsonl")} for part in ("train", "eval")}
        assert answers["train"].isdisjoint(answers["eval"]) and len(answers["eval"]) > 5
        assert len(records(agent / source / "train.jsonl")) == count


async def test_rooms_of_babyai_are_solved_by_its_bot(agent, tmp_path):
    pytest.importorskip("gymnasium", reason="needs the extra `environments`")
    pytest.importorskip("minigrid", reason="needs minigrid")
    pool = EnvironmentPool(tmp_path, EnvironmentLimits(concurrency=1))
    try:
        for record in records(agent / "babyai" / "eval.jsonl")[:6]:
            seen = await played(pool, "babyai", record["answer"], demonstration=f"{__name__}:by_bot")
            assert seen[0].text.startswith("<image>mission: go to ") and seen[-1].reward > 0.5, record
    finally:
        await pool.close()


@browsing
async def test_pages_are_solved_in_chromium_and_look_the_same_when_they_are_played_again(agent, tmp_path):
    tasks = [json.loads(record["answer"])["task"] for record in records(agent / "miniwob" / "train.jsonl")[:26]]
    spec = importlib.util.find_spec("miniwob")
    assert spec is not None and spec.origin is not None
    pages = pathlib.Path(spec.origin).parent / "html" / "miniwob"
    assert all((pages / f"{task}.html").is_file() for task in tasks)
    button = json.dumps({"task": "click-button", "seed": 5})
    turns = ["press the button", "click 1001 5", "press tab", "drag 900 900 950 950", "scroll 900 900 down"]
    form = json.dumps({"task": "enter-text", "seed": 3})  # Enter "Myron"
    filled = ["click 300 330", "I type it.\n`type Myron`", "press tab", "<think>click 0 0</think>press enter"]
    plays = []
    for _ in range(2):  # in two browsers
        pool = EnvironmentPool(tmp_path, EnvironmentLimits(concurrency=1))
        try:
            plays.append([await played(pool, "miniwob", button, turns), await played(pool, "miniwob", form, filled)])
        finally:
            await pool.close()
    (first, second), again = plays
    assert [first, second] == again
    assert first[0].text.startswith('<image>Click on the "') and second[0].text.startswith('<image>Enter "Myron"')
    assert first[1].text.startswith("Nothing was done: there is no key 'the button'. Answer with")
    assert first[2].text.startswith("Nothing was done: click takes 2 numbers from 0 to 1000.")
    assert [s.info.get("command") for s in first[3:]] == ["press", "drag", "scroll", "click"]
    assert [s.info["command"] for s in second[1:]] == ["click", "type", "press", "press"]
    assert (first[-1].reward, first[-1].done, second[-1].reward, second[-1].done) == (1.0, True, 1.0, True)


@browsing
async def test_a_wrong_click_ends_the_task_without_a_reward_and_turns_are_bounded(tmp_path):
    pool = EnvironmentPool(tmp_path, EnvironmentLimits(concurrency=1))
    try:
        wrong = await played(
            pool, "miniwob", json.dumps({"task": "click-test-2", "seed": 1}), ["nothing"] * 2, max_turns=2
        )
        assert (wrong[-1].done, wrong[-1].reward, len(wrong)) == (True, 0.0, 3)
        # Enter in an empty field sends the wrong text.
        turns = ["click 300 330", "press tab", "press enter"]
        wrong = await played(pool, "miniwob", json.dumps({"task": "enter-text", "seed": 3}), turns)
        assert (wrong[-1].done, wrong[-1].reward, len(wrong)) == (True, 0.0, 4)
    finally:
        await pool.close()


@browsing
async def test_a_browser_that_dies_costs_its_episode_alone(tmp_path):
    config = cli.load(["--config=configs/qwen3_vl_8b.py:agent"]).data.sources["miniwob"]
    record, button = Prompt("p", "miniwob", "Do it.", ""), json.dumps({"task": "click-button", "seed": 5})
    pool = EnvironmentPool(tmp_path, EnvironmentLimits(concurrency=1))
    try:
        for while_idle in (False, True):
            episode = await pool.start(config.environment, record, 1, config.environment_arguments)
            (worker,) = [p for p in descendants(os.getpid()) if "fluxjax.base.worker_process" in _command(p)]
            if while_idle:
                await episode.end()
            for process in descendants(worker)[1:]:
                os.kill(process, signal.SIGKILL)
            if not while_idle:
                with pytest.raises(EnvironmentFailure, match="the browser failed") as caught:
                    await asyncio.wait_for(episode.act("click 500 500"), 60)
                assert caught.value.fault is Fault.RAISED
            assert (await played(pool, "miniwob", button))[-1].reward == 1.0
    finally:
        await pool.close()


def _command(process: int) -> str:
    return pathlib.Path(f"/proc/{process}/cmdline").read_bytes().decode()


def test_the_example_says_what_to_install(tmp_path):
    command = [sys.executable, "examples/browser_environment.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "chromium and chromedriver: pip install miniwob, and apt-get install chromium" in last
