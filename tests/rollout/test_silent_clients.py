"""Strangers who connect and say nothing, or little: they take few connections, no thread and no log, and keep nobody
with the token out. What is too long, or has no token, is turned away before an application reads it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fluxjax.report.prometheus import PrometheusPort
from rollout import listening
from rollout.listening import SILENT, bound_socket, http_server
from rollout.serve_guard import Guarded, error_handlers, health_route
from rollout.sglang import ServerClient
from sharding.links.meeting import Card, connect, listen
from sharding.links.wires import Wire

STRANGERS = 200
SAID = (
    b"",
    b"GET /",
    b"\x00nonsense\r\n\r\n",
    b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
)


@contextlib.contextmanager
def server() -> Iterator[int]:
    """The port of a server with a token."""

    async def count(request: Request) -> Response:
        return Response(str(len(await request.body())))

    routes = [health_route("/mine"), Route("/generate", count, methods=["POST"])]
    app = Guarded(Starlette(routes=routes), "secret", lambda: False)
    bound = bound_socket("127.0.0.1", 0)
    begun = threading.Event()
    http = http_server(app, begun.set)
    thread = threading.Thread(target=asyncio.run, args=(http.serve([bound]),))
    thread.start()
    assert begun.wait(20)
    yield bound.getsockname()[1]
    http.should_exit = True
    thread.join()


@contextlib.contextmanager
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("FLUXJAX_TOKEN", "secret")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = PrometheusPort(port)
    yield port
    served.close()


@contextlib.contextmanager
def strangers(port: int, said: tuple[bytes, ...] = (b"",)) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as ends:
        callers = [ends.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(STRANGERS)]
        for number, caller in enumerate(callers):
            with contextlib.suppress(OSError):  # it had to make room
                caller.sendall(said[number % len(said)])
        yield callers


def still_connected(callers: list[socket.socket], most: int) -> int:
    """Counts the callers that are still connected, once there are no more than `most` of them, or ten seconds later."""
    end = time.monotonic() + 10
    while True:
        left = []
        for caller in callers:
            with contextlib.suppress(OSError):
                while (ready := select.select([caller], [], [], 0)[0]) and caller.recv(4096):
                    pass
                if not ready:
                    left.append(caller)
        if len(left) <= most or time.monotonic() > end:
            return len(left)
        time.sleep(0.02)


def status(port: int, path: str = "/mine", token: str = "secret") -> int:
    caller = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    caller.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    code = caller.getresponse().status
    caller.close()
    return code


@pytest.mark.parametrize("kind", ["server", "metrics"])
def test_the_owner_gets_in_whoever_else_is_connected(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = threading.active_count()
    with server() if kind == "server" else metrics(monkeypatch) as port, strangers(port, SAID) as callers:
        assert status(port) == 200 and status(port, token="no") == 401
        assert still_connected(callers, SILENT) <= SILENT
        assert threading.active_count() <= threads + 1
        with strangers(port):
            assert status(port) == 200
    assert len("".join(record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)) < 1000
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_who_says_no_head_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.2)
    with server() as port, strangers(port, SAID[:2]) as callers:
        assert still_connected(callers, 0) == 0 and status(port) == 200


def test_a_connection_of_a_stranger_ends_with_its_first_answer() -> None:
    with server() as port:
        for path in ("/health", "/mine"):
            with socket.create_connection(("127.0.0.1", port), 20) as caller:
                caller.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n".encode())
                with caller.makefile("rb") as answer:
                    assert b"connection: close" in answer.read()  # to its end


@pytest.mark.medium
async def test_a_client_with_many_requests_does_not_shut_itself_out() -> None:
    """Its connections say nothing while it is busy, as with the bodies of hundreds of held-out prompts."""

    async def asked(client: ServerClient, number: int) -> bytes:
        time.sleep(0.002)  # nothing else runs meanwhile
        async with client._reach("POST", "/generate", bytes(200_000), None) as response:
            return await response.read()

    with server() as port:
        client = ServerClient(f"http://127.0.0.1:{port}", token="secret")
        answers = await asyncio.gather(*(asked(client, number) for number in range(8 * SILENT)))
        await client.close()
    assert answers == [b"200000"] * 8 * SILENT


def test_greetings_do_not_wait_for_each_other() -> None:
    """Strangers before and behind the friend say nothing, a part of a line, nonsense, or a depth that is none."""
    said = (b"", b"{", b"[" * 1023 + b"\n", b'{"secret": "\\ud800"}\n', b"x" * 2000)
    with listen("127.0.0.1", 2) as door:
        port = door.getsockname()[1]
        cards = [Card("here", "127.0.0.1", port, "", "s0"), Card("here", "127.0.0.1", 1, "", "s1")]
        known: dict[int, Wire] = {}
        thread = threading.Thread(target=lambda: known.update(connect(0, cards, door, 60.0)))
        thread.start()
        with strangers(port, said) as callers:
            began = time.monotonic()
            [friend] = connect(1, cards, door, 60.0).values()
            thread.join(20)
            assert time.monotonic() - began < 4 and list(known) == [1]
            assert still_connected(callers, 0) == 0
            friend.write({"kind": "alive"})
            assert known[1].read() == ({"kind": "alive"}, b"")
            friend.close()
            known[1].close()


# --- what is turned away before an application reads it --------------------------------------------


class Application:
    def __init__(self, most: int) -> None:
        self.read: list[int] = []
        app = Starlette(routes=[Route("/", self._take, methods=["POST"])], exception_handlers=error_handlers())
        self._guarded = Guarded(app, "secret", lambda: False, most)

    async def _take(self, request: Request) -> Response:
        self.read.append(len(await request.body()))
        return Response()

    def answered(self, *pieces: bytes, says_length: bool, token: str = "secret") -> int:
        """The status of the answer to a request with this body."""
        headers = [(b"authorization", f"Bearer {token}".encode())]
        headers += [(b"content-length", str(sum(map(len, pieces))).encode())] if says_length else []
        waiting = list(pieces)
        answers: list[Any] = []

        async def receive() -> dict[str, Any]:
            piece = waiting.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

        async def send(message: Any) -> None:
            answers.append(message)

        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
        asyncio.run(self._guarded(scope, receive, send))
        return answers[0]["status"]


@pytest.mark.parametrize("says_length", [False, True])
def test_a_body_is_bounded_before_it_is_read(says_length):
    application = Application(most=10)
    assert application.answered(b"12345", b"67890", says_length=says_length) == 200
    assert application.answered(b"12345", b"67890", b"1", says_length=says_length) == 413
    assert application.read == [10]


def test_the_token_comes_first():
    application = Application(most=10)
    assert application.answered(b"12345678901", says_length=True, token="secre") == 401 and not application.read
