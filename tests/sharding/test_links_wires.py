"""The wires below the links, within one process: greetings, heartbeats, last words."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from sharding.links import LinkError
from sharding.links.meeting import Card, connect, listen, own_address, place
from sharding.links.wires import Message, Wire, Wires, widen_send_buffers

Pair = Callable[[], tuple[Wire, socket.socket]]


class Log:
    """What is heard of the peers: the callbacks of `Wires`."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.why: list[str] = []
        self.gone = threading.Event()

    def hear(self, process: int, message: Message, data: bytes) -> None:
        self.heard.append((process, message["kind"]))

    def lose(self, process: int, why: str) -> None:
        self.why.append(why)
        self.gone.set()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Makes both ends of a connection: a wire, which its `Wires` close, and what the peer holds."""
    held = []

    def make() -> tuple[Wire, socket.socket]:
        near, far = socket.socketpair()
        held.append(far)
        return Wire(near, near.makefile("rb"), threading.Lock()), far

    yield make
    for far in held:
        far.close()
    for thread in threading.enumerate():
        if thread.name.startswith("link-") and thread.name != "link-arrival":
            thread.join(30)


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 3) as opened:
        yield opened


def read(far: socket.socket) -> object:
    with far.makefile("rb") as lines:
        return json.loads(lines.readline())


def test_silence_is_noticed_and_a_heartbeat_heard(pair: Pair) -> None:
    wire, far = pair()
    log = Log()
    wires = Wires({3: wire}, 2.0, log.hear, log.lose)
    for _ in range(3):
        far.sendall(b'{"kind": "alive"}\n')
    assert read(far) == {"kind": "alive"}
    assert log.gone.wait(20) and log.why == ["it has not answered for 2 s"]
    assert log.heard == [(3, "alive")] * 3
    wires.close()


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (b"", "its connection closed"),
        (b"nonsense\n", "JSONDecodeError"),
        (b'{"kind": "data", "bytes": "9999999999999"}\n', "9999999999999 bytes were announced"),
        (b'{"kind": "data", "bytes": "-1"}\n', "-1 bytes were announced"),
        (b"x" * 100_000, "more than 65536 bytes"),
        (b'{"kind": "data", "bytes": "10"}\nabc', "3 of 10 bytes came"),
    ],
)
def test_messages_are_heard_before_the_end(pair: Pair, last: bytes, why: str) -> None:
    """A size is bounded before anything of it is read."""
    wire, far = pair()
    log = Log()
    far.sendall(b'{"kind": "count"}\n' * 1000 + last)
    far.close()
    wires = Wires({0: wire}, 20.0, log.hear, log.lose)
    assert log.gone.wait(20) and log.heard == [(0, "count")] * 1000 and why in log.why[0]
    wires.send(0, {"kind": "alive"})  # never raises
    wires.close()


def test_a_peer_that_reads_nothing_holds_nobody_up(pair: Pair) -> None:
    stuck, _ = pair()
    other, far = pair()
    log = Log()
    wires = Wires({1: stuck, 2: other}, 3600.0, log.hear, log.lose)
    threading.Thread(target=wires.send, args=(1, {"kind": "x" * 10_000_000}), daemon=True).start()
    telling = threading.Thread(target=wires.tell_all, args=({"kind": "failed"},), daemon=True)
    telling.start()
    telling.join(300)
    assert not telling.is_alive()
    assert read(far) == {"kind": "failed"}
    wires.close()


def card(door: socket.socket | None, secret: str) -> Card:
    return Card("here", "127.0.0.1", door.getsockname()[1] if door else 1, "", secret)


def test_strangers_are_turned_away(door: socket.socket) -> None:
    """Whoever hangs up, does not know the secret, is a process that was not expected, or talks nonsense."""
    cards = [card(door, "s0"), card(None, "s1")]
    said = [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b'{"process": 1, "secret": "s1"}\n',
        b'{"process": 7, "secret": "s0"}\n',
        b"[]\n",
    ]
    with contextlib.ExitStack() as ends:
        strangers = [ends.enter_context(socket.create_connection(door.getsockname())) for _ in said]
        for stranger, words in zip(strangers, said, strict=True):
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        [friend] = connect(1, cards, door, 60.0).items()
        [known] = connect(0, cards, door, 60.0).items()
        assert (friend[0], known[0]) == (0, 1)
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):  # what it said was not read to its end
                assert stranger.recv(10) == b""
        friend[1].close()
        known[1].close()


def test_a_process_that_never_comes(door: socket.socket) -> None:
    cards = [card(door, "a"), card(None, "b"), card(None, "c")]
    with pytest.raises(LinkError, match=r"process 0 \(here\) was not called by process 1, 2 at 127.0.0.1:\d+: timed"):
        connect(0, cards, door, 0.2)
    with pytest.raises(LinkError, match=r"process 2 \(here\) can't reach process 1 \(here\) at 127.0.0.1:1: .*refused"):
        connect(2, cards, door, 30.0)
    with pytest.raises(LinkError, match=r"can't listen at 192\.0\.2\.1, is it an address of"):
        listen("192.0.2.1", 2)


def test_addresses() -> None:
    assert place() == place()
    listen(own_address(["no-such-host.invalid"]), 2).close()  # it is one of this host
    assert own_address(["localhost", "::1"]) == own_address([])  # no other host reaches a loopback address


def test_data_comes_whole_and_in_order_behind_its_message(pair: Pair) -> None:
    wire, far = pair()
    log, came = Log(), []
    other = Wire(far, far.makefile("rb"), threading.Lock())
    wires = Wires({0: wire}, 20.0, lambda process, message, data: came.append((message["kind"], data)), log.lose)
    pieces = [b"", b"\n", b'{"kind": "alive"}\n', os.urandom(3_000_000)]
    for piece in pieces:
        other.write({"kind": "data", "bytes": str(len(piece))}, piece)
        other.write({"kind": "alive"})
    other.close()
    assert log.gone.wait(20) and log.why == ["its connection closed"]
    assert came == [one for piece in pieces for one in (("data", piece), ("alive", b""))]
    wires.close()


@given(st.lists(st.sampled_from([0, 1, 7, 300_000]), max_size=1500))
@settings(deadline=None, max_examples=third_of(20))
def test_data_in_many_parts_comes_joined(sizes: list[int]) -> None:
    """More of them than a call to the system takes, larger than its buffers, and some of them empty."""
    near, far = (Wire.on(end) for end in _connected())
    parts = [os.urandom(size) for size in sizes[:40]] + [os.urandom(size % 9) for size in sizes[40:]]
    whole = b"".join(parts)
    near.socket.settimeout(20.0)
    with ThreadPoolExecutor() as pool:
        came = pool.submit(far.read)
        near.write({"bytes": str(len(whole))}, *parts)
        assert came.result(20) == ({"bytes": str(len(whole))}, whole)
    near.close()
    far.close()


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        return near, door.accept()[0]


def test_connections_of_this_process_hold_more_than_a_packet() -> None:
    """Also those that a library opened and tells nobody of."""

    def room(end: socket.socket) -> int:
        return end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as ours:
        theirs, _ = door.accept()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
                assert room(end) < 1 << 16
            widen_send_buffers()
            assert min(room(ours), room(theirs)) > 1 << 17
            ours.sendall(b"still there")
            assert theirs.recv(100) == b"still there"
