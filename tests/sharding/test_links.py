"""Ties between processes: real processes on loopback, really killed and stopped. Nothing may hang."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from turns import by_turns

from sharding.links import LinkError, Links

WORKER = pathlib.Path(__file__).with_name("links_worker.py")
LIMIT = 300.0  # seconds after which a team is taken for hung


class Team:
    """The processes of one scenario, each a process group of its own, with their output in files."""

    def __init__(self, folder: pathlib.Path, scenario: str, processes: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder = folder
        self.end = time.monotonic() + LIMIT
        self.members = []
        for process in range(processes):
            self._file(process, "words").touch()
            command = [sys.executable, WORKER, scenario, process, port, processes, self._file(process, "words")]
            with self._file(process, "err").open("wb") as err:
                self.members.append(
                    subprocess.Popen(
                        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
                    )
                )

    def _file(self, process: int, stream: str) -> pathlib.Path:
        return self.folder / f"{process}.{stream}"

    def words(self, process: int) -> list[str]:
        return self._file(process, "words").read_text().splitlines()

    def errors(self, process: int) -> list[str]:
        """The lines of standard error."""
        return self._file(process, "err").read_text().splitlines()

    def until(self, word: str, processes: Iterator[int] | list[int]) -> None:
        for process in processes:
            while word not in self.words(process):
                assert time.monotonic() < self.end and self.members[process].poll() is None, self.report()
                time.sleep(0.05)

    def codes(self, processes: list[int]) -> list[int]:
        """The exit statuses of processes that end by themselves."""
        try:
            return [self.members[process].wait(max(self.end - time.monotonic(), 0.1)) for process in processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.report()) from None

    def signal(self, process: int, number: int) -> None:
        os.kill(self.members[process].pid, number)

    def report(self) -> str:
        return "\n".join(f"{p} {m.poll()}: {self.words(p)} {self.errors(p)}" for p, m in enumerate(self.members))

    def kill(self) -> None:
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.pid, signal.SIGKILL)
            member.wait()


@contextlib.contextmanager
def team(folder: pathlib.Path, scenario: str, processes: int) -> Iterator[Team]:
    members = Team(folder, scenario, processes)
    try:
        yield members
    finally:
        members.kill()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which sockets listen")
def test_processes_of_one_host_are_called_on_loopback_only(tmp_path: pathlib.Path) -> None:
    """Wires, arrays, and JAX's coordination and gloo as well."""
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    with team(tmp_path, "listening", 2) as run:
        assert run.codes([0, 1]) == [0, 0], run.report()
        for process in (0, 1):
            assert len(run.words(process)) >= 3 and set(run.words(process)) <= loopback, run.report()


@pytest.mark.slow
@pytest.mark.parametrize("processes", by_turns([2, 3]))
def test_arrays_and_messages(tmp_path: pathlib.Path, processes: int) -> None:
    """Bit by bit, before and after the offer, from many threads onto two devices; counters; barriers; a quiet end."""
    with team(tmp_path, "exchange", processes) as run:
        assert run.codes(list(range(processes))) == [0] * processes, run.report()
        for process in range(processes):
            assert run.words(process) == ["values", "early", "threads", "barrier", "closed"]
            assert run.errors(process) == []


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "processes"), by_turns([(0, 2), (1, 3)], first=1))
def test_a_killed_process(tmp_path: pathlib.Path, dies: int, processes: int) -> None:
    """Process 0 takes JAX's coordination service with it; the others still say in one line what happened."""
    with team(tmp_path, f"victim{dies}", processes) as run:
        run.until("waiting", list(range(processes)))
        run.signal(dies, signal.SIGKILL)
        others = [process for process in range(processes) if process != dies]
        assert run.codes(others) == [7] * len(others), run.report()
        for process in others:
            assert run.words(process) == ["waiting", "told"], run.report()
            [line] = run.errors(process)
            assert f"process {dies} ({socket.gethostname()}) is lost: its connection closed. All" in line


@pytest.mark.slow
def test_process_0_killed_without_a_relay(tmp_path: pathlib.Path) -> None:
    """JAX aborts the survivor within a tenth of a second; it gets its line out before."""
    with team(tmp_path, "bare0", 2) as run:
        run.until("waiting", [0, 1])
        run.signal(0, signal.SIGKILL)
        assert run.codes([1]) in ([1], [-signal.SIGABRT]), run.report()
        assert any("process 0 (" in line and "is lost" in line for line in run.errors(1)), run.report()


@pytest.mark.long
def test_a_stopped_process(tmp_path: pathlib.Path) -> None:
    with team(tmp_path, "stopped", 2) as run:
        run.until("waiting", [0, 1])
        run.signal(1, signal.SIGSTOP)
        assert run.codes([0]) == [7] and run.words(0) == ["waiting", "told"], run.report()
        [line] = run.errors(0)
        assert f"process 1 ({socket.gethostname()}) is lost: it has not answered for 10 s. All processes" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "why"),
    [
        pytest.param(signal.SIGSTOP, 1, "it has not answered for 10 s", marks=pytest.mark.long),
        (signal.SIGKILL, 7, "its connection closed"),
    ],
)
def test_a_process_inside_a_collective(tmp_path: pathlib.Path, number: int, code: int, why: str) -> None:
    """Nothing wakes it where the other is stopped: it is ended. Where that is killed, gloo raises, and the cause is
    found behind its error."""
    with team(tmp_path, "collective", 2) as run:
        run.until("waiting", [0, 1])
        run.signal(1, number)
        assert run.codes([0]) == [code], run.report()
        [line] = run.errors(0)
        assert f"process 1 ({socket.gethostname()}) is lost: {why}. All processes" in line


@pytest.mark.slow
def test_a_reported_failure(tmp_path: pathlib.Path) -> None:
    """Process 1 raises; process 0, which waits for it in every way, is told why. The same line from each."""
    with team(tmp_path, "failing", 2) as run:
        assert run.codes([0, 1]) == [7, 7], run.report()
        assert run.words(0) == ["waiting", "told"]
        host = socket.gethostname()
        for process in range(2):
            [line] = run.errors(process)
            assert f"process 1 ({host}) failed: ValueError: a device thread has no memory. All processes" in line


@pytest.mark.long
def test_an_orderly_close(tmp_path: pathlib.Path) -> None:
    """No failure, but for who still waits for the one that closed."""
    with team(tmp_path, "closing", 2) as run:
        run.until("told", [0])
        assert run.codes([0]) == [7] and len(run.errors(0)) == 1, run.report()


def test_one_process_alone() -> None:
    links = Links()
    assert (links.process, links.processes) == (0, 1)
    links.offer(1, [jnp.ones(3)])
    links.ready([jax.jit(lambda x: x + 1)(jnp.ones(3))])
    links.notify(0, "a")
    links.wait("a", 1)
    links.forget("a")
    links.notify(0, "a")
    links.wait("a", 1)
    links.barrier("b")
    links.check()
    with pytest.raises(ValueError, match="process 0 of 1 can't fetch from process 1"):
        links.fetch(1, 1, [], jax.devices()[0])
    links.fail("no  reason")
    links.fail("another")
    for call in (links.check, lambda: links.wait("a", 2), lambda: links.barrier("b"), lambda: links.ready([])):
        with pytest.raises(LinkError, match=r"process 0 \(.*\) failed: no reason\. All processes"):
            call()
