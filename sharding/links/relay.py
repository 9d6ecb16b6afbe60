"""Starting `jax.distributed` so that the death of process 0 leaves the others the time to say so.

Process 0 serves JAX's coordination service. When its connection closes, JAX 0.10.2 aborts every other process within
0.1 s, with a stack trace and SIGABRT; neither `jax_enable_recoverability` nor a heartbeat time-out changes that, and
a callback in Python can't be given (its argument can't be converted). But the abort comes from the connection that
closes: without that, a process misses its heartbeats only after `heartbeat_timeout_seconds` (100). So the others reach
the service through a relay of their own, which forwards every byte, and never closes their side.
"""

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

_PATIENCE = 20.0  # seconds to wait for the service before the caller is turned away, and tries again
_PIECE = 1 << 16

_in_use = False


def initialize(coordinator: str, processes: int, process: int, **options: Any) -> None:
    """Calls `jax.distributed.initialize(coordinator, processes, process, **options)`, through a relay if not process 0.

    `coordinator` is `host:port`; on loopback, no other host reaches the service. `heartbeat_timeout_seconds` must stay
    above the time-out of `Links`, which else has no time to name the process that hangs. JAX's calls to the service
    release the interpreter lock, so that a relay in threads of this process is enough.
    """
    global _in_use
    if process > 0:
        coordinator, _in_use = _relay(coordinator), True
    elif is_loopback(coordinator.rpartition(":")[0]):
        options.setdefault("coordinator_bind_address", coordinator)  # JAX listens on all interfaces else
    jax.distributed.initialize(coordinator, processes, process, **options)


def is_loopback(host: str) -> bool:
    """Says whether the name or address is one of this host that no other can mean."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def survives_coordinator() -> bool:
    """Tells whether JAX lets this process live for a while when process 0 has died."""
    return _in_use


def _relay(coordinator: str) -> str:
    host, _, port = coordinator.rpartition(":")
    target = (host.strip("[]"), int(port))
    door = socket.create_server(("127.0.0.1", 0))
    _start(_serve, door, target)
    return f"127.0.0.1:{door.getsockname()[1]}"


def _serve(door: socket.socket, target: tuple[str, int]) -> None:
    while True:
        near, _ = door.accept()
        _start(_connect, near, target)


def _connect(near: socket.socket, target: tuple[str, int]) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            far = socket.create_connection(target, timeout=_PATIENCE)
            break
        except OSError:  # process 0 has not come so far
            if time.monotonic() > end:
                near.close()
                return
            time.sleep(0.1)
    far.settimeout(None)
    for side in (near, far):
        side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _start(_forward, far, near, False)
    _forward(near, far, True)


def _forward(source: socket.socket, target: socket.socket, close: bool) -> None:
    """Forwards until either side ends. The far side's end is kept from the near one: see the top of this file."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            target.sendall(piece)
    if close:
        with contextlib.suppress(OSError):  # `socket.close` would wait for the other direction
            target.shutdown(socket.SHUT_WR)


def _start(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="coordination-relay", daemon=True).start()
