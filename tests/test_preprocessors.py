"""The preprocessors of a run on its host: real processes that start, die, hang, and end with the run."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from flight_cases import ROOT, SETTINGS, check, pictures
from process_cases import gone, until

from fluxjax.base.errors import DataError
from fluxjax.config.data import DataConfig
from fluxjax.runtime.flight_store import FlightStore
from fluxjax.runtime.preprocessors import Preprocessors

SMALL = DataConfig(workers=1, cache_gib=0.25)


@pytest.mark.slow
def test_a_preprocessor_that_dies_or_hangs_is_started_again(tmp_path):
    refs, folder = pictures(tmp_path, 8), tmp_path / "preprocessors"
    with contextlib.closing(Preprocessors(2, folder, SMALL, prefix="host/")) as preprocessors:
        first = preprocessors.addresses
        assert list(first) == ["host/preprocessor-0", "host/preprocessor-1"]
        assert sorted(path.name for path in folder.iterdir()) == ["preprocessor-0.log", "preprocessor-1.log"]
        command = pathlib.Path(f"/proc/{preprocessors.pids['host/preprocessor-0']}/cmdline").read_text().split("\0")
        assert {"--workers=1", "--cache-gib=0.25"} < set(command)
        waits: dict[str, Any] = {"lease_seconds": 2.0, "patience": 60.0, "silent": preprocessors.restart}
        store = FlightStore(first, SETTINGS, preprocessors.token, **waits)
        preprocessors.tell(store)
        with contextlib.closing(store):
            check(store, refs)
            pids = preprocessors.pids  # a slow machine's may have been silent before
            os.kill(pids["host/preprocessor-0"], signal.SIGKILL)
            check(store, refs)
            until(lambda: preprocessors.pids.get("host/preprocessor-0", 0) not in (0, pids["host/preprocessor-0"]))
            until(lambda: preprocessors.addresses == first)  # other processes know them there
            until(lambda: all(place.up for place in store.statuses()))
            pids = preprocessors.pids
            os.kill(pids["host/preprocessor-1"], signal.SIGSTOP)
            check(store, pictures(tmp_path / "more", 8))
            until(lambda: gone(pids["host/preprocessor-1"]))
            until(lambda: all(place.up for place in store.statuses()))
            check(store, refs)
            assert all(place.looks for place in store.statuses())
        pids = preprocessors.pids
    assert len(pids) == 2 and all(map(gone, pids.values()))


def test_one_that_does_not_start_is_an_error_with_the_end_of_its_log(tmp_path):
    with pytest.raises(DataError, match="preprocessor-0 ended with status 2; its log, ") as told:
        Preprocessors(1, tmp_path, SMALL, host="203.0.113.1")
    assert "error: --listen 203.0.113.1:0 can't be listened on" in str(told.value)
    with pytest.raises(DataError, match="preprocessor-0 does not listen after 0 s"):
        Preprocessors(1, tmp_path, SMALL, start_seconds=0.0)


@pytest.mark.slow
def test_one_that_dies_again_and_again_ends_the_run(tmp_path):
    refs = pictures(tmp_path, 1)
    with contextlib.closing(Preprocessors(1, tmp_path, SMALL, restarts=1)) as preprocessors:
        store = FlightStore(preprocessors.addresses, SETTINGS, preprocessors.token, patience=60.0)
        preprocessors.tell(store)
        with contextlib.closing(store):
            check(store, refs)
            first = preprocessors.pids["preprocessor-0"]
            os.kill(first, signal.SIGKILL)
            until(lambda: preprocessors.pids.get("preprocessor-0", first) != first)
            os.kill(preprocessors.pids["preprocessor-0"], signal.SIGKILL)
            with pytest.raises(DataError, match="preprocessor-0 ended with status -9, 2 times in a row; its log"):
                while True:
                    store.look(refs)
                    time.sleep(0.05)


@pytest.mark.medium
def test_they_end_with_the_run(tmp_path):
    code = f"""
import os, pathlib, signal
from fluxjax.config.data import DataConfig
from fluxjax.runtime.preprocessors import Preprocessors
started = Preprocessors(1, pathlib.Path({str(tmp_path)!r}), DataConfig(workers=1))
print(started.pids['preprocessor-0'], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGKILL, run.stderr
    until(lambda: gone(int(run.stdout)))
