"""Decodes media for the processes of a run, and hands out slices of the media over Arrow Flight.

    python -m fluxjax.preprocess
    python -m fluxjax.preprocess --listen 10.0.0.7:7070 --workers 32 --cache-gib 64

A run starts its own preprocessors (`data.preprocessors`). A preprocessor that is ready prints one line of JSON,
{"address": "HOST:PORT", "protocol": 2}. The preprocessor must see the media files under the names that the run uses.
SIGTERM and SIGINT end it. To listen on other than loopback addresses, a preprocessor needs a token in the variable
FLUXJAX_TOKEN; the run must have the same token. Wrong input ends the command with one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rollout.listening import TOKEN, Parser, is_loopback

from .base.errors import ConfigError
from .config.bounds import check_fields
from .config.data import DataConfig

if TYPE_CHECKING:
    from models.processing.media import MediaSettings

    from .data.flight_server import SliceStore

GRACE = 2.0  # seconds that calls under way have after SIGTERM or SIGINT


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options: `host`, `port`, `token`, and `config`, a DataConfig."""
    parser = Parser(prog="python -m fluxjax.preprocess", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT",
                        help="where to listen; port 0: any free one (default 127.0.0.1:0)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=0, help="processes that decode (0: one for each core)")
    parser.add_argument("--cache-gib", type=float, default=DataConfig().cache_gib,
                        help="decoded media kept in memory (default %(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    options.config = DataConfig(workers=options.workers, cache_gib=options.cache_gib)
    try:
        check_fields(options.config)
    except ConfigError as error:
        parser.error(f"--{str(error).replace('cache_gib', 'cache-gib')}")
    host, colon, port = options.listen.rpartition(":")
    options.host = host.removeprefix("[").removesuffix("]")
    if not colon or not options.host or not port.isdecimal() or int(port) > 65535:
        parser.error(f"--listen {options.listen}: must be HOST:PORT, with a port of 0 .. 65535")
    options.port, options.token = int(port), os.environ.get(TOKEN, "")
    if not options.token and not is_loopback(options.host):
        parser.error(
            f"--listen {options.listen} can be reached from other machines: set {TOKEN}, here and for the run, so that "
            "only the run can have this machine's images and videos"
        )
    if not options.token.isascii() or any(character.isspace() for character in options.token):
        parser.error(f"{TOKEN} must be ASCII without white space")
    return options


def serve(options: argparse.Namespace, make_store: Callable[[MediaSettings], SliceStore]) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError if it can't listen."""
    from .data.flight_server import FlightServer
    from .data.flight_wire import PROTOCOL

    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    threads = 2 * (options.config.workers or _cores())
    server = FlightServer(make_store, options.host, options.port, token=options.token, threads=threads)
    print(json.dumps({"address": server.address, "protocol": PROTOCOL}), flush=True)
    while not told.wait(1.0):  # Python handles signals between two waits
        pass
    server.close(GRACE)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)

    def make_store(settings: MediaSettings) -> SliceStore:  # with workers and a cache of its own
        from .data.local_store import LocalStore

        return LocalStore(settings, options.config, workers=options.config.workers or _cores())

    try:
        serve(options, make_store)
    except OSError as error:
        print(f"error: --listen {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python would wait for threads: calls under way, workers that decode
