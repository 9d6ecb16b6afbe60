"""Starts all processes of a run on this machine, and starts them again when one of them fails.

    python -m fluxjax.launch --processes 2 -- --config=configs/vlm.py --config.run_dir=runs/two

Arguments behind `--` go to `python -m fluxjax.train`. Process 0 writes here, every other process N to
RUN.process-N.log beside the run's folder. When a process is killed, fails or freezes, all processes end, and a new
attempt goes on from the newest checkpoint. At most --restarts new attempts in a row begin without a newer checkpoint.
An error that only you can mend (a setting, a file) ends the run. On clusters, start `fluxjax.train` itself, with
`--config.distributed.*`; a run that the scheduler starts again (deploy/) goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from .base.errors import LOST, USER, ConfigError
from .config import cli, run_folder

GRACE = 10.0  # seconds in which all processes must end when one has failed
AT_ONCE = 15.0  # seconds in which all processes must end after a second signal
STOPPED = 20.0  # seconds after which a process that is stopped (SIGSTOP), or does not end with the others, has failed
LOOK_SECONDS = 0.05


def main(argv: Sequence[str]) -> int:
    launch, train = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        prog="python -m fluxjax.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = "number of processes, including process 0; 4,2: four at first, two after a restart"
    parser.add_argument("--processes", type=_counts, required=True, metavar="N[,N...]", help=words)
    words = "limit of restarts in a row without a new checkpoint (default 3)"
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help=words)
    options = parser.parse_args(launch)
    if min(options.processes) < 1:
        parser.error(f"--processes is {min(options.processes)}; it must be at least 1")
    if launch and not train:
        parser.error("nothing to train: put the arguments of fluxjax.train behind --")
    try:
        config = cli.load(train)
        folder = run_folder.named(config)
        if folder.is_dir():
            run_folder.lock(folder).close()  # fails if another run is going on there
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER
    supervisor = Supervisor(options.processes, options.restarts, train, folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: supervisor.stop(number))
    return supervisor.run()


def _counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


class Supervisor:
    """Runs the attempts of one run, one after the other."""

    def __init__(self, processes: Sequence[int], restarts: int, train: Sequence[str], folder: pathlib.Path) -> None:
        """`processes` has each attempt's number of processes, the last for all further ones. `folder` is the run's."""
        self._processes, self._restarts, self._folder = processes, restarts, folder
        self._train = [*train, f"--config.run_dir={folder}"]
        self._run: Processes | None = None
        self._signals = self._number = 0  # signals heard, and the number of the last

    def run(self) -> int:
        """Returns the exit status: 0; USER for an error that only the user can mend; 128 + the number of the second
        signal; otherwise the status of the process that is the likeliest cause of the last attempt's failure."""
        attempt, idle, status = 0, 0, 0
        while not self._signals:
            attempt += 1
            before = self._newest()
            failed = self._attempt(self._processes[min(attempt, len(self._processes)) - 1])
            if failed is None:
                return 0
            status = failed.status
            print(f"{failed}; all processes have ended", file=sys.stderr)
            if self._signals > 1:
                return 128 + self._number
            if self._signals:
                break
            if failed.by_user:
                return USER
            newest = self._newest()
            idle = 0 if newest != before else idle + 1
            if idle > self._restarts:
                print(f"error: {idle} attempts in a row ended without a new checkpoint; see above", file=sys.stderr)
                break
            print(f"attempt {attempt + 1} goes on from {newest}", file=sys.stderr, flush=True)
        return status

    def stop(self, number: int) -> None:
        """Passes a signal on to process 0. After the first signal, process 0 ends all processes in good order; after
        the second signal, all processes end within AT_ONCE seconds. No further attempt begins."""
        self._signals, self._number = self._signals + 1, number
        if self._run is not None:
            self._run.signal(number)
            if self._signals == 2:
                self._run.deadline = time.monotonic() + AT_ONCE

    def _attempt(self, count: int) -> Failure | None:
        with contextlib.ExitStack() as stack:
            if count > 1:
                self._folder.parent.mkdir(parents=True, exist_ok=True)
            files = (f"{self._folder}.process-{process}.log" for process in range(1, count))
            logs = [stack.enter_context(open(file, "a")) for file in files]
            self._run = Processes(count, self._train, logs)
            stack.callback(self._run.kill)
            if self._signals:  # the signal came while the processes were started
                self._run.signal(signal.SIGTERM)
            return self._run.wait()

    def _newest(self) -> str:
        """Describes the state that an attempt starts from."""
        steps: list[int] = []
        with contextlib.suppress(OSError):
            steps = [int(entry.name) for entry in (self._folder / "checkpoints").iterdir() if entry.name.isdigit()]
        return f"the checkpoint of step {max(steps)}" if steps else "the beginning"


class Failure:
    """The end of an attempt that failed. `process` is the likeliest cause; `by_user` says whether only the user can
    mend the error; `status` is the exit status that a shell would show."""

    def __init__(self, ended: Mapping[int, int], frozen: Collection[int] = ()) -> None:
        """`ended` has the statuses of the processes that failed, in the order in which they ended; `frozen` are
        processes that did not end by themselves, the likeliest reason first."""
        killed = [process for process, status in ended.items() if status < 0 and process not in frozen]
        failed = [process for process, status in ended.items() if status != LOST]
        self.process = next(iter([*killed, *frozen, *failed, *ended]))
        self._how = ended[self.process]
        self._frozen = self.process in frozen
        self.by_user = USER in ended.values()
        self.status = 128 - self._how if self._how < 0 else self._how

    def __str__(self) -> str:
        if self._frozen:
            return f"process {self.process} was stopped, or did not end with the others"
        how = f"was ended by {signal.Signals(-self._how).name}" if self._how < 0 else f"ended with {self._how}"
        return f"process {self.process} {how}"


class Processes:
    """The processes of one attempt, children of this process."""

    def __init__(self, count: int, train: Sequence[str], logs: Sequence[IO[str]]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = [f"--config.distributed.coordinator=127.0.0.1:{port}", f"--config.distributed.processes={count}"]
        # `local_server.py` ends a process when its launcher ends, so that the process frees its GPU and its port.
        bound = pathlib.Path(__file__).resolve().parent.parent / "rollout" / "local_server.py"
        command = [sys.executable, str(bound), sys.executable, "-m", "fluxjax.train", *train]
        command += shared if count > 1 else []
        self._children: list[subprocess.Popen[bytes]] = []
        self.deadline = float("inf")  # when `wait` kills the running processes
        for process in range(count):
            out = logs[process - 1] if process else None
            rank = [f"--config.distributed.process={process}"] if process else []
            self._children.append(subprocess.Popen([*command, *rank], stdout=out, stderr=out, start_new_session=True))

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._children[0].send_signal(number)

    def wait(self) -> Failure | None:
        """Waits until all processes have ended; returns the failure, or None. Kills the processes that still run GRACE
        or STOPPED seconds after a process has ended or was stopped, or at `deadline`."""
        ended: dict[int, int] = {}
        frozen: list[int] = []
        since = going = time.monotonic()
        while running := [process for process, child in enumerate(self._children) if child.poll() is None]:
            self._note(ended)
            stopped = [process for process in running if _is_stopped(self._children[process])]
            now = time.monotonic()
            since, going = since if len(running) < len(self._children) else now, going if stopped else now
            if now > min(since + (GRACE if ended else STOPPED), going + STOPPED, self.deadline):
                frozen = sorted(running, key=lambda process: process not in stopped)
                self.kill()
            time.sleep(LOOK_SECONDS)
        self._note(ended)
        return Failure(ended, frozen) if ended else None

    def _note(self, ended: dict[int, int]) -> None:
        for process, child in enumerate(self._children):
            if child.poll() and process not in ended:
                ended[process] = child.returncode

    def kill(self) -> None:
        """Kills the processes that still run, and waits for their end."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        for child in self._children:
            child.wait()


def _is_stopped(child: subprocess.Popen[bytes]) -> bool:
    """Says whether the process is stopped (SIGSTOP), which others notice by heartbeats only if they were connected."""
    with contextlib.suppress(ChildProcessError, AttributeError):  # macOS has no `waitid` before Python 3.13
        return os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
