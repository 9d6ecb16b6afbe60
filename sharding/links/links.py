"""Links between the processes of a run, beside collectives: arrays on demand, messages, counters, failure reports."""

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from ..mesh import Device
from .meeting import Card, connect, gather, listen, own_address, place
from .wires import MOST, LinkError, Message, Wires, keep_send_buffers_wide

ADVICE = "All processes of the run end; start them all again, and the run goes on from its last checkpoint."

_STREAMS = 2  # TCP streams between two transfer servers; on one host 1, 2 and 4 are equally fast
_PROBE = 2**64 - 1  # minus a process's number: the key of the array that this process fetches as a test
_LINE = 1000  # characters of a reported failure
_LOOK = 1.0  # seconds between two checks in a wait for messages, if no message wakes it
_GLANCE = 0.1  # seconds between two checks in a wait for arrays
_NEWS = 2.0  # seconds within which the wires report a death that broke a transfer


class Links:
    """Arrays travel through `jax.experimental.transfer`. One TCP connection between each two processes carries messages
    and notices a death at once. Any thread may call the methods, but only one at a time may `receive` from a process,
    or wait at a barrier of one name.

    Creation is collective: all processes of `jax.distributed` (started by `initialize` of this package) create `Links`
    in the same order. Raises LinkError if the processes do not reach each other within `timeout` seconds: over loopback
    if all share a host, otherwise at the address from which a host speaks to the others.

    A peer is lost if its connection closes without `close` (its process was killed or crashed), or if it sends nothing
    for `timeout` seconds (its process is stopped, its host or network is gone). `timeout` must be below JAX's own
    `heartbeat_timeout_seconds`. After a loss or a reported failure, waits and later calls raise LinkError, and every
    peer gets a report. `leave` ends this process after `grace` seconds, since a thread inside a collective with a dead
    process can't be woken.
    """

    def __init__(self, *, timeout: float = 60.0, grace: float = 10.0) -> None:
        self.process = jax.process_index()
        self.processes = jax.process_count()
        self.rank_here = 0  # number of lower-numbered processes that share this process's loopback interface
        self._timeout = timeout
        self._grace = grace
        self._news = threading.Condition()  # guards the fields below
        self._counts: collections.Counter[str] = collections.Counter()  # by topic
        self._boxes: collections.defaultdict[int, collections.deque[bytes]] = collections.defaultdict(collections.deque)
        self._failure = ""
        self._announced = False  # a failure is being reported, or has been reported
        self._closed = False
        self._peers_closed: dict[int, float] = {}  # when each peer closed its links
        self._cards: list[Card] = []
        self._peers = [peer for peer in range(self.processes) if peer != self.process]
        self._wires: Wires | None = None
        if self._peers:
            self._meet()

    def _meet(self) -> None:
        names, places = zip(*gather([socket.gethostname(), place()]), strict=True)
        self.rank_here = places[: self.process].count(places[self.process])
        away = [name for name, where in zip(names, places, strict=True) if where != places[self.process]]
        host = own_address(away) if away else "127.0.0.1"
        self._cards = [Card(name, "", 0, "", "") for name in names]
        bound = f"[{host}]:0" if ":" in host else f"{host}:0"
        with listen(host, self.processes) as door:
            self._server = transfer.start_transfer_server(jax.local_devices()[0].client, bound, [bound] * _STREAMS)
            port, transfers, secret = door.getsockname()[1], self._server.address(), secrets.token_hex(16)
            mine = Card(names[self.process], host, port, transfers, secret)
            self._cards = [Card(**fields) for fields in gather(dataclasses.asdict(mine))]
            wires = connect(self.process, self._cards, door, self._timeout)
        self._connections = {peer: self._server.connect(self._cards[peer].transfer) for peer in self._peers}
        self._wires = Wires(wires, self._timeout, self._heard, self._gone)
        keep_send_buffers_wide(lambda: self._closed)
        self._probe()

    def _probe(self) -> None:
        """Fetches one number from each peer, so that a firewall that blocks arrays is noticed here."""
        device = jax.local_devices()[0]
        for peer in self._peers:
            self.offer(_PROBE - peer, [jax.device_put(np.array([self.process], np.int32), device)])
        like = [jax.ShapeDtypeStruct((1,), np.int32)]
        got = {peer: self.fetch(peer, _PROBE - self.process, like, device) for peer in self._peers}
        end = time.monotonic() + self._timeout
        for peer, arrays in got.items():
            if not _arrive(arrays, lambda: bool(self._failure) or time.monotonic() > end):
                self.fail(f"no array came from {self._name(peer)} at {self._cards[peer].transfer}; open the ports")
                raise self._error()
        self.barrier("links")

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """Offers `arrays` under `key` for one fetch by one peer, without waiting. Each is on one local device and may
        still be computing. A key is 0 to 2**63 and used once in the life of this process. Arrays are held until they
        have been fetched; donating or deleting one earlier breaks the fetch. Raises ValueError for an empty array."""
        self.check()
        if not all(array.size for array in arrays):
            raise ValueError(f"an empty array is offered under {key}: whoever fetches it would wait for ever")
        if self._peers:
            self._server.await_pull(key, list(arrays))

    def fetch(self, process: int, key: int, like: Sequence[jax.ShapeDtypeStruct], device: Device) -> list[jax.Array]:
        """Fetches to the local `device`, without waiting, the arrays that `process` offers, or will offer, under `key`.
        `like` has the shapes and dtypes of the offer. Programs can be called on the arrays before they are filled in.
        Wait with `ready` for them, and for results, since `jax.block_until_ready` hangs if the peer hangs."""
        self.check()
        if process not in self._peers:
            raise ValueError(f"process {self.process} of {self.processes} can't fetch from process {process}")
        where = SingleDeviceSharding(device)
        specs = [jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=where) for spec in like]
        return list(self._connections[process].pull(key, specs))

    def ready(self, arrays: Sequence[jax.Array]) -> None:
        """Waits until all `arrays` are fetched or computed. Raises LinkError, or the error of the computing program."""
        self.check()
        try:
            if _arrive(arrays, self._hopeless):
                return
        except Exception as error:
            reason = self.explain(error)
            if reason is error:
                raise
            raise reason from error
        raise self._error()

    def explain(self, error: BaseException) -> BaseException:
        """The LinkError that explains an error of a program, collective or transfer, or else `error`. Waits up to two
        seconds: a program that needed a dead process may fail before the wires report the death."""
        if self._peers and not isinstance(error, LinkError):
            with self._news:
                if self._news.wait_for(lambda: self._failure, _NEWS):
                    return self._error()
        return error

    def notify(self, process: int, topic: str) -> None:
        """Adds 1 to the count of `topic` in `process`, which may be this process. Does not wait."""
        self.check()
        if process == self.process:
            self._count(topic)
        elif self._wires is None or process not in self._peers:
            raise ValueError(f"there is no process {process}: the run has {self.processes} processes")
        else:
            self._wires.send(process, {"kind": "count", "topic": topic})

    def counted(self, topic: str) -> int:
        """Returns the number of notifications of `topic` that have arrived so far."""
        with self._news:
            return self._counts[topic]

    def wait(self, topic: str, at_least: int) -> None:
        """Waits until `at_least` notifications of `topic` have ever arrived. Raises LinkError after a failure."""
        self._await(lambda: self._counts[topic] >= at_least, self._hopeless)

    def send(self, process: int, *data: bytes) -> int:
        """Sends `data`, joined to one message, to the peer `process`, whose `receive` returns messages in order.
        Returns the number of bytes. Waits only if the peer's buffers are full. Raises ValueError above a GiB."""
        self.check()
        size = sum(map(len, data))
        if size > MOST:
            raise ValueError(f"{size} bytes for process {process}; at most {MOST} are sent at once")
        if self._wires is None or process not in self._peers:
            raise ValueError(f"process {process} of {self.processes} is no peer of process {self.process}")
        self._wires.send(process, {"kind": "data", "bytes": str(size)}, *data)
        return size

    def receive(self, process: int) -> bytes:
        """Waits for the next message of `process`, and returns it. Raises LinkError if a failure comes first."""
        box = self._boxes[process]
        self._await(lambda: bool(box), lambda: self._over() or process in self._peers_closed)
        with self._news:
            return box.popleft()

    def forget(self, prefix: str) -> None:
        """Sets the counts of topics that begin with `prefix` back to zero, and frees their memory. After a `barrier`,
        all notifications that peers sent before their calls of `barrier` have arrived."""
        with self._news:
            for topic in [topic for topic in self._counts if topic.startswith(prefix)]:
                del self._counts[topic]

    def barrier(self, name: str) -> None:
        """Waits until all processes have called `barrier` with `name` as often as this one, without devices. Raises
        LinkError if a failure comes first."""
        self.check()
        for peer in self._peers:
            self.notify(peer, f"barrier of {self.process}: {name}")

        def missing() -> set[int]:
            return {peer for peer in self._peers if not self._counts[f"barrier of {peer}: {name}"]}

        self._await(lambda: not missing(), lambda: self._over() or bool(missing() & self._peers_closed.keys()))
        with self._news:
            self._counts.subtract(f"barrier of {peer}: {name}" for peer in self._peers)
            self._counts = +self._counts  # keeps the counts of peers that are one call ahead, and drops zeros

    def fail(self, reason: str) -> None:
        """Reports to all processes that this process has failed: waits raise LinkError with `reason`, also in this
        process. Only the first failure of a run counts. Never raises."""
        self._announce(f"{self._name(self.process)} failed: {reason}")

    def check(self) -> None:
        """Raises LinkError if a peer is lost, or a process has failed, or these links are closed."""
        if self._over():
            raise self._error()

    def close(self) -> None:
        """Closes the links in good order, after a `barrier`: peers may still fetch arrays. Then `receive` and `barrier`
        fail at once in a peer, other waits after the time-out. After a failure, call `leave` instead."""
        with self._news:
            if self._closed or self._announced:
                return
            self._closed = True
            self._news.notify_all()
        if self._wires is not None:
            self._wires.tell_all({"kind": "closed"})
            self._wires.close()

    @property
    def address(self) -> str:
        """The IP address at which the peers reach this process."""
        return self._cards[self.process].address if self._cards else "127.0.0.1"

    @property
    def name(self) -> str:
        """This process and its host, as failures name it."""
        return self._name(self.process)

    def _name(self, process: int) -> str:
        host = self._cards[process].host if self._cards else socket.gethostname()
        return f"process {process} ({host})"

    def _count(self, topic: str) -> None:
        with self._news:
            self._counts[topic] += 1
            self._news.notify_all()

    def _await(self, come: Callable[[], bool], hopeless: Callable[[], bool]) -> None:
        with self._news:
            while not come():
                if hopeless():
                    raise self._error()
                self._news.wait(_LOOK)

    def _over(self) -> bool:
        return bool(self._failure) or self._closed

    def _hopeless(self) -> bool:
        """Says whether missing messages and arrays will never arrive: after a failure, or when a peer has been closed
        for longer than the time-out. Until then messages may be under way, or come from another peer."""
        late = time.monotonic() - self._timeout
        return self._over() or any(when < late for when in self._peers_closed.values())

    def _error(self) -> LinkError:
        if self._failure:
            return LinkError(f"{self._failure} {ADVICE}")
        if self._closed:
            return LinkError(f"the links of {self._name(self.process)} are closed")
        names = ", ".join(map(self._name, sorted(self._peers_closed)))
        return LinkError(
            f"{names} closed the links, but {self._name(self.process)} still waits for an answer. {ADVICE}"
        )

    def _heard(self, peer: int, message: Message, data: bytes) -> None:
        match message["kind"]:
            case "data":
                with self._news:
                    self._boxes[peer].append(data)
                    self._news.notify_all()
            case "count":
                self._count(message["topic"])
            case "failed":
                self._announce(str(message["text"]))
            case "closed":
                with self._news:
                    self._peers_closed[peer] = time.monotonic()
                    self._news.notify_all()

    def _gone(self, peer: int, why: str) -> None:
        with self._news:
            expected = peer in self._peers_closed or self._closed
        if not expected:
            self._announce(f"{self._name(peer)} is lost: {why}")

    def _announce(self, text: str) -> None:
        with self._news:
            if self._announced or self._closed:  # the caller must not end the process before all peers have the report
                self._news.wait_for(lambda: self._failure or self._closed, 2 * _NEWS)
                return
            self._announced = True
        text = " ".join(text.split())[:_LINE].rstrip(".") + "."
        if self._wires is not None:
            self._wires.tell_all({"kind": "failed", "text": text})
        with self._news:
            self._failure = text
            self._news.notify_all()
        if self._wires is not None:
            grace = threading.Timer(self._grace, leave, (self._error(), self))
            grace.daemon = True
            grace.start()


def _arrive(arrays: Sequence[jax.Array], hopeless: Callable[[], bool]) -> bool:
    """Returns True once all `arrays` are fetched or computed, False soon after `hopeless()`. Raises the error of the
    program or transfer that should have filled them. JAX's own wait, which never ends if a peer hangs, runs in a
    thread that can't be stopped."""
    done, errors = threading.Event(), list[Exception]()

    def wait() -> None:
        try:
            jax.block_until_ready(arrays)
        except Exception as error:
            errors.append(error)
        done.set()

    threading.Thread(target=wait, name="link-arrival", daemon=True).start()
    while not done.wait(_GLANCE):
        if hopeless():
            return False
    if errors:
        raise errors.pop()
    return True


_ending = threading.Lock()


def leave(error: BaseException, links: Links | None = None, code: int = 1) -> NoReturn:
    """Reports `error` to the peers, and ends this process at once with one line on standard error and exit status
    `code`. Python's exit handlers do not run, so files must be written before: JAX's handler waits for dead processes
    until the heartbeat time-out (100 s), and aborts. A thread that waits within JAX for arrays that never arrive would
    abort an interpreter that ends."""
    error = error if links is None else links.explain(error)
    line = str(error) if isinstance(error, LinkError) else f"{type(error).__name__}: {error}"
    if links is not None:
        links.fail(line)
        if links._failure and not isinstance(error, LinkError):
            line = str(links._error())
    if not _ending.acquire(blocking=False):  # another thread is ending the process
        threading.Event().wait()
    with contextlib.suppress(OSError):
        os.write(2, (" ".join(line.split()) + "\n").encode())
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(_NEWS)  # a thread that hangs may hold the lock of a stream
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
