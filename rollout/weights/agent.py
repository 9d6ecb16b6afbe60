"""Pulls weights for the rollout servers of its host: `python -m rollout.weights.agent --host 0.0.0.0 --port 30100`.

Released SGLang reads weights from folders of its own host only. The trainer writes whole versions with Orbax, and
deltas between them, into a folder that the hosts share (weights.folder). On `POST /pull_weights` from the trainer, the
agent makes a checkpoint folder of a version, in its host's shared memory, for all servers of the host. The agent prints
one line, `listening on http://HOST:PORT`, when it is ready. SIGTERM and SIGINT end the agent and remove its folders.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import shutil
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route


def main(arguments: Sequence[str] | None = None) -> int:
    from ..listening import Parser, add_network_flags, bound_socket, check_network_flags, exit_status

    def run(options: argparse.Namespace) -> None:
        with bound_socket(options.host, options.port) as listening:
            asyncio.run(_serve(listening, options.token))

    parser = Parser(prog="python -m rollout.weights.agent", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add_network_flags(parser)
    options = parser.parse_args(arguments)
    check_network_flags(parser, options)
    return exit_status(run, options)


async def _serve(listening: socket.socket, token: str) -> None:
    from starlette.applications import Starlette

    from ..listening import serve_until_told
    from ..serve_guard import Guarded, error_handlers, health_route

    places, stopping = set[pathlib.Path](), asyncio.Event()
    app = Starlette(routes=[pull_route(places), health_route()], exception_handlers=error_handlers())

    async def stop() -> None:
        stopping.set()
        for place in places:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    await serve_until_told(Guarded(app, token, stopping.is_set), listening, stop)


def pull_route(places: set[pathlib.Path]) -> Route:
    """The route `/pull_weights` of a host: a version in the folder that hosts share becomes a checkpoint in the host's
    memory, below a folder that is added to `places`. Fields are those of SGLang's pull request 30367, which changes a
    checkpoint in place. Here, the answer's `model_path` is a new folder for each version, since another server of the
    host may still read an earlier version."""
    from starlette.routing import Route

    from ..serve_guard import AsciiJSON
    from ..serve_requests import read_json_object
    from ..wire import BadRequest
    from .version_folders import pull, pulled

    async def handle(request: Request) -> Response:
        body = read_json_object(await request.body())
        local, source, version = (body.get(key) for key in ("local_checkpoint_dir", "source_dir", "target_version"))
        if not isinstance(local, str) or not isinstance(source, str) or not local or not source:
            raise BadRequest("local_checkpoint_dir and source_dir must be strings that are not empty")
        if type(version) is not int or version < 0:
            raise BadRequest("target_version must be a whole number")
        here, there = pathlib.Path(local), pathlib.Path(source)
        try:
            folder = await asyncio.to_thread(pull, here, there, version)
            places.add(pulled(here, there))
        except Exception as error:  # the servers of this host keep their weights
            return AsciiJSON({"success": False, "message": f"{type(error).__name__}: {error}"}, 400)
        return AsciiJSON({"success": True, "message": "Success.", "model_path": str(folder)})

    return Route("/pull_weights", handle, methods=["POST"])


if __name__ == "__main__":
    sys.exit(main())
