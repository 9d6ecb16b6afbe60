"""Several processes of one run on this machine, as tests start them."""

import json
import pathlib
import socket
import sys
import time

from forked import forked


class Processes:
    """The processes of one run: each is `tests/WORKER SETTINGS`, with its output in files; none outlives the test."""

    def __init__(self, worker, folder, own, **settings):
        """`own` are the settings of each process beside those of all."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder = folder
        self.processes = []
        for process, more in enumerate(own):
            shared = {"coordinator": f"127.0.0.1:{port}", "processes": len(own), "process": process}
            command = [
                sys.executable,
                str(pathlib.Path(__file__).with_name(worker)),
                json.dumps(shared | settings | more),
            ]
            with (folder / f"out{process}").open("w") as out, (folder / f"err{process}").open("w") as err:
                self.processes.append(forked(command, stdout=out, stderr=err, start_new_session=True))

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
