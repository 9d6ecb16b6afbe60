"""What ends a run: one signal in good order, two at once, an error of any kind with word to the others."""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from conftest import ROOT
from process_cases import until
from run_cases import Commands, checkpoint_steps, ended, logged

from fluxjax import launch
from fluxjax.base import event_loop
from fluxjax.base.timeline import under_way
from fluxjax.base.types import PreparedPrompt, Prompt, Reward
from fluxjax.config import Config
from fluxjax.run import main
from fluxjax.run.parts import HeldOut
from fluxjax.runtime.ports import EvaluationGivenUp
from models.inputs import ModelInput
from rollout.engine import FinishReason, SamplingParams, TokenChunk


@pytest.fixture
def restored_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored_signals")
def test_signals_are_heard_while_the_main_thread_hears_none():
    heard, both = [], threading.Event()
    stops = [lambda: heard.append(("stop", time.monotonic()))]

    def end(number: int) -> None:
        heard.append((number, time.monotonic()))
        both.set()

    def send() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    event_loop.hear_signals(stops, end)
    threading.Timer(0.05, send).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # no handler of Python runs before it is done
    done = time.monotonic()
    assert both.wait(5)
    assert [what for what, _ in heard] == ["stop", signal.SIGINT] and heard[-1][1] < done


@pytest.mark.medium
def test_a_signal_before_the_run_hears_any_ends_it_without_a_traceback():
    """A KeyboardInterrupt would be ignored where it comes within a callback of the garbage collector."""
    code = """
import os, runpy, signal, sys, types

class Collected:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def main(config):
    Collected()
    return 0

sys.modules["fluxjax.run.main"] = types.SimpleNamespace(main=main)
sys.argv = ["train", "--config=configs/text.py:debug"]
runpy.run_module("fluxjax.train", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


class Silent:
    """An engine that never answers the second prompt."""

    def __init__(self) -> None:
        self.closed = 0

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def generate(self, request):
        try:
            if request.seed:
                await asyncio.Event().wait()
            yield TokenChunk(request.rid, 0, (1,), (-0.5,), (0,), FinishReason.STOP)
        finally:
            self.closed += 1


def test_an_evaluation_says_how_far_it_is_and_is_given_up_for_a_stop():
    engine, stopping = Silent(), []
    one = np.zeros(1, np.int32)
    inputs = ModelInput(one, np.zeros((3, 1), np.int32), one - 1, 1)
    prepared = [PreparedPrompt(Prompt(str(k), "s", "?", "a"), inputs) for k in range(3)]

    async def score(prompt: Prompt, text: str, rewards: tuple[float, ...]) -> Reward:
        return Reward(1.0, True)

    held_out = HeldOut(
        {"s": prepared}, score, lambda ids: "a", SamplingParams(max_new_tokens=1), lambda: bool(stopping)
    )

    async def measure() -> None:
        work = asyncio.create_task(held_out.accuracy(engine))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert "evaluating 1/3" in under_way()
        stopping.append(True)
        with pytest.raises(EvaluationGivenUp):
            await asyncio.wait_for(work, 5)
        assert engine.closed == 3 and "evaluating" not in under_way()

    asyncio.run(measure())


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), ValueError("x")])
def test_the_others_are_told_of_every_error(error, monkeypatch):
    links = types.SimpleNamespace(explain=lambda error: error)
    told = []

    def leave(error: BaseException, links: object, code: int = 1) -> None:
        told.append((error, links, code))
        raise TimeoutError  # it never returns

    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(main, "hear_signals", lambda *_: None)
    monkeypatch.setattr(main, "take_signals", lambda: None)
    monkeypatch.setattr(main, "joined", lambda *_: types.SimpleNamespace(process=0, links=links))
    monkeypatch.setattr(main, "FluxTrainer", broken)
    monkeypatch.setattr(main, "leave", leave)
    with pytest.raises(TimeoutError):
        main.main(Config())
    assert told == [(error, links, 1)]


def stubborn(tmp_path, *codes: str) -> tuple[launch.Supervisor, launch.Processes]:
    """A supervisor of processes that run this code, and hear no signal but SIGKILL."""
    supervisor, processes = launch.Supervisor([len(codes)], 0, [], tmp_path / "run"), object.__new__(launch.Processes)
    deaf = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
    processes._children = [subprocess.Popen([sys.executable, "-c", deaf + code]) for code in codes]
    processes.deadline = float("inf")
    supervisor._run = processes
    return supervisor, processes


def test_a_second_signal_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "AT_ONCE", 0.5)
    supervisor, processes = stubborn(tmp_path, "time.sleep(60)", "time.sleep(60)")
    time.sleep(0.3)
    began = time.monotonic()
    supervisor.stop(signal.SIGINT)
    assert processes.deadline == float("inf"), "a step may take long"
    supervisor.stop(signal.SIGINT)
    failure = processes.wait()
    assert failure is not None and failure.status == 128 + signal.SIGKILL and time.monotonic() < began + 5


def test_who_does_not_end_with_the_others_is_ended(tmp_path, monkeypatch):
    """Also where the first process ended as if nothing was wrong."""
    monkeypatch.setattr(launch, "STOPPED", 0.5)
    _, processes = stubborn(tmp_path, "0", "time.sleep(60)")
    assert "process 1 was stopped, or did not end with the others" in str(processes.wait())


@pytest.mark.long
def test_two_signals_end_both_processes_at_once(commands: Commands, tmp_path):
    run_dir = tmp_path / "run"
    arguments = ["--config.warm_start.steps=2", "--config.evaluation.samples=4", "--config.steps=500"]
    process = commands.start(run_dir, "configs/vlm.py:debug", arguments, processes=2)
    with ended(process):
        until(logged(run_dir, "warm_start", 1), 300)
        before, began = checkpoint_steps(run_dir), time.monotonic()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert process.wait(20) == 128 + signal.SIGINT and time.monotonic() < began + 20
    assert checkpoint_steps(run_dir) == before
    assert "stopped at once by SIGINT" in (tmp_path / "run.process-1.log").read_text()
