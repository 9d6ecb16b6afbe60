"""Callers at the door of a process, and peers that say something else than messages.

A friend gets in whoever else calls, and a peer that talks nonsense is lost, which ends every wait: nothing hangs, and
no thread dies of it.
"""

import contextlib
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from junk import ODD, spoiled, spoiled_bytes

from fuzz.draws import each
from sharding.links import LinkError, Links
from sharding.links.meeting import Card, connect, listen
from sharding.links.wires import Wire, Wires

DRAWS = 100
SECONDS = 10.0  # in which everything has happened
MESSAGES = (
    {"kind": "alive"},
    {"kind": "count", "topic": "t"},
    {"kind": "data", "bytes": "5"},
    {"kind": "failed", "text": "process 1 failed"},
    {"kind": "closed"},
)


def run(count: int, seed: int) -> list[str]:
    return each(count, seed, lambda draw: (_meets if draw.random() < 0.3 else _listens)(draw))


def _greeting(draw: random.Random, card: Card) -> bytes:
    good = {"process": "1", "secret": card.secret if draw.random() < 0.2 else "guessed"}
    if draw.random() < 0.3:
        return draw.choice((b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 2000 + b"\n", b"x" * 5000, b"\x16\x03\x01"))
    words = json.dumps(spoiled(good, draw)).encode() + b"\n"
    return spoiled_bytes(words, draw) if card.secret.encode() not in words else words[: draw.randrange(len(words))]


def _meets(draw: random.Random) -> None:
    with listen("127.0.0.1", 2) as door, contextlib.ExitStack() as ends:
        port = door.getsockname()[1]
        cards = [Card("here", "127.0.0.1", port, "", "s0-secret"), Card("here", "127.0.0.1", 1, "", "s1")]
        meeting = ends.enter_context(ThreadPoolExecutor()).submit(connect, 0, cards, door, SECONDS)
        for _ in range(draw.randint(0, 90 if draw.random() < 0.1 else 9)):
            caller = ends.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            with contextlib.suppress(OSError):
                caller.sendall(_greeting(draw, cards[0]))
                if draw.random() < 0.3:
                    caller.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        [friend] = connect(1, cards, door, SECONDS).values()
        known = meeting.result(SECONDS)
        assert time.monotonic() - began < SECONDS / 2, "the friend waited for strangers"
        friend.write({"kind": "alive"})
        assert known[1].read() == ({"kind": "alive"}, b"")
        friend.close()
        known[1].close()


def _said(draw: random.Random) -> bytes:
    words = []
    for _ in range(draw.randint(1, 5)):
        message = draw.choice(MESSAGES)
        line: object = spoiled(message, draw, 1) if draw.random() < 0.5 else message
        line = draw.choice(ODD) if draw.random() < 0.05 else line
        data = b"12345" if message["kind"] == "data" else b""
        words.append(json.dumps(line).encode() + b"\n" + data)
    said = b"".join(words)
    return spoiled_bytes(said, draw) if draw.random() < 0.3 else said


def _listens(draw: random.Random) -> None:
    near, far = socket.socketpair()
    gone: list[str] = []
    over = threading.Event()
    links = Links()
    links._peers = [1]

    def lose(peer: int, why: str) -> None:
        gone.append(why)
        links._gone(peer, why)
        over.set()

    wires = Wires({1: Wire(near, near.makefile("rb"), threading.Lock())}, SECONDS, links._heard, lose)
    with far, contextlib.suppress(OSError):
        far.sendall(_said(draw))
        far.shutdown(socket.SHUT_WR)
    assert over.wait(SECONDS), "the thread that listens to the peer neither goes on nor ends"
    wires.close()
    assert len(gone) == 1 and "\n" not in gone[0]
    if not links._peers_closed:
        try:
            links.check()
        except LinkError as error:
            assert "\n" not in str(error)
        else:
            raise AssertionError(f"nobody is told that the peer is gone: {gone[0]}")
