"""Servers as processes of this machine: they end whole, and with the process that started them."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from fleet_cases import group_exists, sleeper
from protocol_cases import ROOT
from rollout_cases import until

from rollout.local_server import ServerCommand


async def test_a_local_server_ends_with_all_of_its_processes(tmp_path: pathlib.Path) -> None:
    server = sleeper(tmp_path)
    server.start()
    await until(lambda: server.last_words() == "ready")
    pid = server.running.pid
    assert group_exists(pid) and server.ended() is None
    server.stop()
    await until(lambda: not group_exists(pid))  # those that it waits for have ended, others are about to
    server.stop()
    server.start()
    assert server.running.pid != pid
    server.kill()
    await until(lambda: not group_exists(pid))


async def test_a_local_server_that_hangs_is_killed(tmp_path: pathlib.Path) -> None:
    server = sleeper(tmp_path, "trap '' TERM", "echo ready", "while :; do sleep 1; done")
    server.start()
    await until(lambda: server.last_words() == "ready")
    pid = server.running.pid
    server.stop()
    await until(lambda: not group_exists(pid))


async def test_a_local_server_tells_its_last_words(tmp_path: pathlib.Path) -> None:
    server = sleeper(tmp_path, "seq 10", "exit 7")
    server.start()
    await until(lambda: server.ended() is not None)
    assert server.ended() == 7
    assert server.last_words() == "6\n7\n8\n9\n10"


@pytest.mark.medium
async def test_local_servers_end_with_their_process(tmp_path: pathlib.Path) -> None:
    code = f"""
import pathlib, time
from rollout.local_server import LocalServer, ServerCommand
class Script(ServerCommand):
    def words(self, port): return ["/bin/sleep", "1000"]
server = LocalServer(Script("serve", ""), pathlib.Path({str(tmp_path / "log")!r}))
server.start()
print(server.running.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        await until(lambda: pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == "sleep")  # it is bound by then
        parent.kill()
    await until(lambda: not group_exists(pid))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sglang_has_states_of_convolutions_in_the_dtype_of_the_run(dtype: str) -> None:
    command = ServerCommand("sglang", "model", flags=("--device", "cpu", "--dtype", dtype, "--tp-size", "1"))
    assert command.variables()["SGLANG_MAMBA_CONV_DTYPE"] == dtype
