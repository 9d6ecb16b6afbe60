"""Several processes of one run on this machine, as tests start them, and what is waited for."""

import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable

from forked import ROOT, forked


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(holds: Callable[[], object], seconds: float = 60.0, pause: float = 0.01) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(pause)


def gone(pid: int) -> bool:
    """Says whether a process has ended, whether or not its parent has asked for its status yet."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Processes:
    """The processes of one run: each is `tests/WORKER SETTINGS`, with its output in files; none outlives the test."""

    def __init__(self, worker, folder, own, devices=1, **settings):
        """`own` has the settings of each process, `settings` those that all share, `devices` is of each process."""
        self.folder, self.processes = folder, []
        shared = {"coordinator": f"127.0.0.1:{free_port()}", "processes": len(own)} | settings
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"  # the last one counts
        env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
        for process, more in enumerate(own):
            file = pathlib.Path(__file__).with_name(worker)
            command = [sys.executable, str(file), json.dumps(shared | {"process": process} | more)]
            with (folder / f"out{process}").open("w") as out, (folder / f"err{process}").open("w") as err:
                self.processes.append(forked(command, stdout=out, stderr=err, env=env, start_new_session=True))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def ends(self, limit=240):
        """Exit status of each."""
        end = time.monotonic() + limit
        return [process.wait(max(end - time.monotonic(), 0.1)) for process in self.processes]

    def said(self, process):
        """Everything in its JSON lines."""
        lines = (self.folder / f"out{process}").read_text().splitlines()
        return {name: value for line in lines if line.startswith("{") for name, value in json.loads(line).items()}

    def errors(self, process):
        return (self.folder / f"err{process}").read_text()
