"""Starts the processes of one run on this machine, one coordinator and those that train along.

    python -m fluxjax.launch --processes 2 -- --config=configs/vlm.py --config.run_dir=runs/two

What stands behind `--` goes to `python -m fluxjax.train`. Process 0 writes here; the others to RUN.process-1.log and so
on, beside the run's folder, or to files in the working directory where `--config.run_dir` is not given. When one ends
with an error, all end. On clusters, start `fluxjax.train` itself, with `--config.distributed.*`.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO

GRACE = 15.0  # seconds in which all must have ended when one has failed


def main(argv: Sequence[str]) -> int:
    own, train = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        prog="python -m fluxjax.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, required=True, help="how many, process 0 included")
    options = parser.parse_args(own)
    if options.processes < 1:
        parser.error(f"--processes is {options.processes}; it must be at least 1")
    if own and not train:
        parser.error("nothing to train: put the arguments of fluxjax.train behind --")
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(_log(train, process).open("a")) for process in range(1, options.processes)]
        run = Processes(options.processes, train, logs)
        stack.callback(run.kill)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: run.signal(number))
        return run.wait()


def _log(train: Sequence[str], process: int) -> pathlib.Path:
    """Where a process that is not the first writes."""
    given = [word.partition("=")[2] for word in train if word.startswith("--config.run_dir=")]
    file = pathlib.Path(f"{given[-1].rstrip('/') if given else 'fluxjax'}.process-{process}.log")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


class Processes:
    """The processes of one run, as children of this one."""

    def __init__(self, count: int, train: Sequence[str], logs: Sequence[IO[str]]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = [f"--config.distributed.coordinator=127.0.0.1:{port}", f"--config.distributed.processes={count}"]
        # A process that outlived its launcher would keep its GPU, and the port of the coordinator.
        bound = pathlib.Path(__file__).resolve().parent.parent / "rollout" / "bound.py"
        command = [sys.executable, str(bound), sys.executable, "-m", "fluxjax.train", *train]
        command += shared if count > 1 else []
        self._children: list[subprocess.Popen[bytes]] = []
        for process in range(count):
            out = logs[process - 1] if process else None
            own = [f"--config.distributed.process={process}"] if process else []
            self._children.append(subprocess.Popen([*command, *own], stdout=out, stderr=out, start_new_session=True))

    def signal(self, number: int) -> None:
        """To process 0, which ends the others in good order."""
        with contextlib.suppress(ProcessLookupError):
            self._children[0].send_signal(number)

    def wait(self) -> int:
        """Returns when all have ended: 0, or the status of the first that failed, and the others with it."""
        failed, since = 0, 0.0
        while any(child.poll() is None for child in self._children):
            for process, child in enumerate(self._children):
                if not failed and (status := child.poll()):
                    failed, since = status, time.monotonic()
                    print(f"process {process} ended with status {status}; all end", file=sys.stderr)
            if failed and time.monotonic() > since + GRACE:
                self.kill()
            time.sleep(0.1)
        return failed or next((child.returncode for child in self._children if child.returncode), 0)

    def kill(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
