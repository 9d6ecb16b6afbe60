"""Ties between processes: real processes on loopback, really killed and stopped. Nothing may hang."""

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
SILENT = "it has not answered for 10 s"
KILLED = (signal.SIGKILL, 7, "its connection closed")  # the status with which others end, and what they say


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
@pytest.mark.skipif(sys.platform != "linux", reason="pins processes to a core")
def test_arrays_arrive_while_a_process_of_one_core_computes(tmp_path: pathlib.Path) -> None:
    with team(tmp_path, "one_core", 2) as run:
        assert run.codes([0, 1]) == [0, 0], run.report()
        assert run.words(0) == run.words(1) == ["arrived meanwhile"], run.report()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "processes", "victim", "number", "code", "why"),
    [
        *by_turns([("victim0", 2, 0, *KILLED), ("victim1", 3, 1, *KILLED)], first=1),
        pytest.param("stopped", 2, 1, signal.SIGSTOP, 7, SILENT, marks=pytest.mark.long),
        ("collective", 2, 1, *KILLED),
        pytest.param("collective", 2, 1, signal.SIGSTOP, 1, SILENT, marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_killed_or_stopped(
    tmp_path: pathlib.Path, scenario: str, processes: int, victim: int, number: int, code: int, why: str
) -> None:
    """The others say in one line what happened, though process 0 takes JAX's coordination service with it. Nothing
    wakes a process that is inside a collective with a stopped one: it is ended. Where that is killed, gloo raises, and
    the cause is found behind its error."""
    with team(tmp_path, scenario, processes) as run:
        run.until("waiting", list(range(processes)))
        run.signal(victim, number)
        others = [process for process in range(processes) if process != victim]
        assert run.codes(others) == [code] * len(others), run.report()
        for process in others:
            assert run.words(process) == (["waiting"] if scenario == "collective" else ["waiting", "told"])
            [line] = run.errors(process)
            assert f"process {victim} ({socket.gethostname()}) is lost: {why}. All processes" in line


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
