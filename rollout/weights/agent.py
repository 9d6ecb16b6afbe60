"""Pulls weights for the rollout servers of its host: `python -m rollout.weights.agent --host 0.0.0.0 --port 30100`.

SGLang, as it is released, reads weights from folders of its own host only. On `POST /pull_weights` from the trainer,
the agent makes such a folder, in shared memory, of a version in the folder that the hosts share (weights.folder), where
the trainer writes whole versions with Orbax and deltas between them. One agent does for all servers of a host. When it
is ready, it prints one line, `listening on http://HOST:PORT`. SIGTERM and SIGINT end it, and remove what it pulled.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import socket
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    from ..listening import Parser, add_network_flags, bound_socket, check_network_flags

    parser = Parser(prog="python -m rollout.weights.agent", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add_network_flags(parser)
    options = parser.parse_args(arguments)
    check_network_flags(parser, options)
    try:
        with bound_socket(options.host, options.port) as listening:
            asyncio.run(_serve(listening, options.token))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(listening: socket.socket, token: str) -> None:
    from starlette.applications import Starlette

    from ..listening import serve_until_told
    from ..serve_guard import Guarded, error_handlers, health_route
    from .pulls import Pulls

    pulls, stopping = Pulls(), asyncio.Event()
    app = Starlette(routes=[pulls.route(), health_route()], exception_handlers=error_handlers())

    async def stop() -> None:
        stopping.set()
        for place in pulls.places:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    await serve_until_told(Guarded(app, token, stopping.is_set), listening, stop)


if __name__ == "__main__":
    sys.exit(main())
