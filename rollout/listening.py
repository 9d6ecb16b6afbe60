"""The common parts of commands: errors in one line; for commands that listen, flags, a socket and an orderly end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import math
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import uvicorn

TOKEN = "FLUXJAX_TOKEN"
SILENT = 64  # limit of connections without a complete head of a request; one more replaces the oldest
HEAD_SECONDS = 10.0  # most seconds from the beginning of a connection to the end of the head of its first request


class Parser(argparse.ArgumentParser):
    """A parser that answers wrong arguments with one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def exit_status(run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Runs a command. Returns 0, or 2 after one line on stderr for a ValueError, OSError or EngineError."""
    try:
        run(options)
    except (ValueError, OSError, RuntimeError) as error:
        from .engine import EngineError

        if isinstance(error, RuntimeError) and not isinstance(error, EngineError):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def number(
    kind: type[int] | type[float], low: int | float, high: int | float = math.inf, *, above: bool = False
) -> Any:
    """An argparse type: a finite number from `low` (`above`: greater than `low`) to `high`."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low < value if above else low <= value) or not value <= high or value == math.inf:
            bounds = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < 1e30 else "")
            whole = " whole" if kind is int else ""
            raise argparse.ArgumentTypeError(f"must be a{whole} number {bounds}, not {text}")
        return value

    return parse


def add_network_flags(parser: argparse.ArgumentParser) -> None:
    network = parser.add_argument_group("network")
    network.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)"
    )
    network.add_argument(
        "--port", type=number(int, 0, 65535), default=0, metavar="N", help="port to listen on (default: any free one)"
    )
    network.add_argument("--token", default=os.environ.get(TOKEN, ""), metavar="TEXT",
                         help="clients must send `Authorization: Bearer TEXT` to all routes but /health; needed "
                         f"beyond loopback addresses (default: {TOKEN} of the environment)")  # fmt: skip


def check_network_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.token and not is_loopback(options.host):
        parser.error(
            f"--host {options.host} can be reached from other machines: give a --token, or set {TOKEN}, "
            "so that not everybody can change the weights"
        )
    if not options.token.isascii() or any(character.isspace() for character in options.token):
        parser.error("--token must be ASCII without white space")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet: clients are refused until the server is ready. Raises ValueError, which names
    the flags."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as stack:
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            stack.pop_all()
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return bound


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def http_server(app: Any, started: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """The server of an ASGI application: `serve` runs until `should_exit` is set. `started` is called when the server
    is ready. The caller must handle signals, since uvicorn would wait for running samples, then die of the signal."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol  # it bounds the size of heads, unlike httptools

    silent: dict[asyncio.Protocol, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}  # oldest first

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            silent[self] = transport, self.loop.call_later(HEAD_SECONDS, transport.abort)
            if len(silent) > SILENT:
                oldest, _ = silent.pop(next(iter(silent)))
                oldest.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None:
                self.is_heard()

        def connection_lost(self, exc: Exception | None) -> None:
            self.is_heard()
            super().connection_lost(exc)

        def is_heard(self) -> None:
            if self in silent:
                silent.pop(self)[1].cancel()

    class Uvicorn(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for listening in sockets or ():
                listening.listen(2048)  # connections that wait to be accepted
            started()

    return Uvicorn(
        uvicorn.Config(
            app,
            http=Connection,
            access_log=False,
            log_config=None,
            log_level="error",  # else the requests of strangers fill the log
            lifespan="off",
            ws="none",
            backlog=16,  # connections that asyncio accepts at once, before any is closed
            timeout_graceful_shutdown=5,
        )
    )


async def serve_until_told(app: Any, listening: socket.socket, stop: Callable[[], Awaitable[None]]) -> None:
    """Serves an ASGI application and prints the address. At SIGTERM or SIGINT, awaits `stop`, then ends the server."""
    http = http_server(app, lambda: print(f"listening on {address_of(listening)}", flush=True))
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    serving, stopping = asyncio.create_task(http.serve([listening])), asyncio.create_task(told.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    await stop()
    http.should_exit = True
    await serving
