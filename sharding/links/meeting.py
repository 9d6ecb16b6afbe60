"""Exchanges the addresses of the processes of a run, and makes a wire between each two processes.

The processes exchange addresses and secrets through `jax.distributed`. A connection counts only if the caller names its
own process and the secret of the called process.

`initialize` starts `jax.distributed` through a relay in each process but 0, so that these have time to report the death
of process 0 (`docs/parallelism.md`, "Several processes"): a relay never closes the connection to its process.
"""

import contextlib
import dataclasses
import hmac
import ipaddress
import json
import os
import pathlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from .wires import LinkError, Wire

T = TypeVar("T")
_WIDTH = 1024  # bytes of a process's entry in `gather`
_GREETING = 1024  # bytes of a greeting, at most
_STRANGERS = 64  # callers without a greeting, beside the processes; a further caller replaces the oldest
_PATIENCE = 20.0  # seconds for which a relay calls the coordination service before it hangs up; JAX then tries again
_PIECE = 1 << 16  # bytes that a relay reads at once, at most


@dataclasses.dataclass(frozen=True)
class Card:
    """The addresses of a process: `host` is for people, `address` an IP address with the `port` of its wires,
    `transfer` the address of its transfer server. A caller that knows the `secret` is a process of the run."""

    host: str
    address: str
    port: int
    transfer: str
    secret: str


def gather(mine: T) -> list[T]:
    """Returns `mine` of every process, in order, sent as JSON. Collective. Raises LinkError if a process has died,
    or if `mine` takes more than `_WIDTH` bytes."""
    data = json.dumps(mine).encode()
    if len(data) > _WIDTH:
        raise LinkError(f"host name and addresses take {len(data)} bytes, above {_WIDTH}; give a shorter host name")
    try:
        rows = multihost_utils.process_allgather(np.frombuffer(data.ljust(_WIDTH), np.uint8))
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # gloo's errors are ValueErrors
        raise LinkError(f"another process ended before all processes had exchanged their addresses: {error}") from error
    return [json.loads(bytes(row)) for row in np.asarray(rows)]


def place() -> str:
    """Returns the same text in two processes that reach each other over the loopback interface, and in no others."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        return socket.gethostname()


def own_address(peer_hosts: Sequence[str]) -> str:
    """This host's IP address towards the first of `peer_hosts` (names) that it does not reach over loopback; else that
    of the default route, or 127.0.0.1. Sends nothing."""
    for name in (*peer_hosts, "192.0.2.1"):  # an address for documentation: it belongs to nobody
        try:
            found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    local = probe.getsockname()[0]
            except OSError:
                continue
            if not ipaddress.ip_address(local).is_loopback:  # some hosts map their own name to loopback
                return local
    return "127.0.0.1"


def listen(address: str, processes: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=processes + _STRANGERS)
    except OSError as error:
        raise LinkError(f"can't listen at {address}, is it an address of {socket.gethostname()}? {error}") from error


def connect(process: int, cards: Sequence[Card], door: socket.socket, timeout: float) -> dict[int, Wire]:
    """Makes a wire to every peer: calls processes with lower numbers; the other processes call this one at `door`.
    Raises LinkError if a peer is missing after `timeout` seconds."""
    wires: dict[int, Wire] = {}
    here, end = cards[process], time.monotonic() + timeout
    with contextlib.ExitStack() as opened:  # closes the wires if a peer is missing
        for peer, card in enumerate(cards[:process]):
            try:
                wires[peer] = Wire.on(socket.create_connection((card.address, card.port), timeout=_left(end)))
                opened.callback(wires[peer].close)
                wires[peer].write({"process": str(process), "secret": card.secret})
            except OSError as error:
                raise LinkError(
                    f"process {process} ({here.host}) can't reach process {peer} ({card.host}) at "
                    f"{card.address}:{card.port}: {error}. Open the ports between the hosts."
                ) from error
        callers = opened.enter_context(contextlib.closing(_callers(door, _STRANGERS + len(cards), end)))
        while len(wires) < len(cards) - 1:
            try:
                called, greeting = next(callers)
            except OSError as error:
                missing = [str(peer) for peer in range(process + 1, len(cards)) if peer not in wires]
                raise LinkError(
                    f"process {process} ({here.host}) was not called by process {', '.join(missing)} at "
                    f"{here.address}:{here.port}: {error}. Start them all, and open the ports between the hosts."
                ) from error
            peer = _greeted(greeting, here.secret)
            if process < peer < len(cards) and peer not in wires:
                called.settimeout(_left(end))
                wires[peer] = Wire.on(called)
                opened.callback(wires[peer].close)
            else:
                called.close()
        callers.close()
        opened.pop_all()
    return wires


def _callers(door: socket.socket, most: int, end: float) -> Generator[tuple[socket.socket, bytes]]:
    """Yields each caller with its greeting as soon as the greeting's line is complete. At most `most` callers without a
    greeting stay connected: a further caller replaces the oldest. Raises OSError at `end`."""
    said: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as leaving:
        leaving.callback(lambda: [caller.close() for caller in said])
        selector.register(door, selectors.EVENT_READ)
        while time.monotonic() < end:
            for key, _ in selector.select(_left(end)):
                caller: Any = key.fileobj
                if caller is door:
                    caller, _ = door.accept()
                    selector.register(caller, selectors.EVENT_READ)
                    said[caller] = b""
                    if len(said) <= most:
                        continue
                    caller = next(iter(said))
                elif caller not in said:  # the caller was closed above, to make room
                    continue
                else:
                    said[caller] += (piece := _rest_of_line(caller))
                    if piece and len(said[caller]) < _GREETING and not piece.endswith(b"\n"):
                        continue
                selector.unregister(caller)
                if (line := said.pop(caller)).endswith(b"\n"):
                    yield caller, line
                else:
                    caller.close()
    raise TimeoutError("timed out")


def _rest_of_line(caller: socket.socket) -> bytes:
    """Reads the part of a caller's line that has arrived, and no byte after the line. Empty if the caller is gone."""
    with contextlib.suppress(OSError):
        seen = caller.recv(_GREETING, socket.MSG_PEEK)
        return caller.recv(seen.find(b"\n") + 1 or len(seen))
    return b""


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.01)


def _greeted(greeting: bytes, secret: str) -> int:
    """Returns the process that a caller's greeting names; -1 if the greeting lacks the secret."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        said = json.loads(greeting)
        if hmac.compare_digest(str(said["secret"]).encode(), secret.encode()):
            return int(said["process"])
    return -1


def initialize(coordinator: str, processes: int, process: int, **options: Any) -> None:
    """Calls `jax.distributed.initialize` with these arguments; all processes but 0 reach `coordinator` (`host:port`)
    through a relay in threads. `heartbeat_timeout_seconds` must stay above the time-out of `Links`: otherwise `Links`
    has no time to name a process that hangs."""
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1:
        # On one core XLA would have one thread, and arrays of other processes would arrive only between computations.
        os.environ.setdefault("NPROC", "2")
    if process > 0:
        coordinator = _relay(coordinator)
    elif coordinator.startswith(("127.", "[::1]", "localhost:")):
        options.setdefault("coordinator_bind_address", coordinator)  # else JAX listens on all addresses
    jax.distributed.initialize(coordinator, processes, process, **options)


def _relay(coordinator: str) -> str:
    host, _, port = coordinator.rpartition(":")
    target = (host.strip("[]"), int(port))
    door = socket.create_server(("127.0.0.1", 0))
    _start(_serve, door, target)
    return f"127.0.0.1:{door.getsockname()[1]}"


def _serve(door: socket.socket, target: tuple[str, int]) -> None:
    while True:
        near, _ = door.accept()
        _start(_relay_to, near, target)


def _relay_to(near: socket.socket, target: tuple[str, int]) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            far = socket.create_connection(target, timeout=_PATIENCE)
            break
        except OSError:  # process 0 has not started the service yet
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
    """Forwards until either side ends. With `close`, then ends sending to `target` (see the module's docstring)."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            target.sendall(piece)
    if close:
        with contextlib.suppress(OSError):  # `socket.close` would wait for the other direction
            target.shutdown(socket.SHUT_WR)


def _start(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="coordination-relay", daemon=True).start()
