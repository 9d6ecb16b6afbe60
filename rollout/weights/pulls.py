"""The route `/pull_weights` of a host: a version in the folder that hosts share becomes a checkpoint in its memory."""

from __future__ import annotations

import asyncio
import pathlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..serve_calls import AsciiJSON
from ..serve_requests import read_json_object
from ..wire import BadRequest
from .version_folders import pull, pulled


class Pulls:
    """`local_checkpoint_dir`, `source_dir` and `target_version` are those of SGLang's pull request 30367. There, a
    checkpoint changes in place; here, the answer's `model_path` is a folder of its own for each version, for another
    server of the host may be reading the one before."""

    def __init__(self) -> None:
        self.places: set[pathlib.Path] = set()  # where it did

    def route(self) -> Route:
        return Route("/pull_weights", self._pull, methods=["POST"])

    async def _pull(self, request: Request) -> Response:
        body = read_json_object(await request.body())
        local, source, version = (body.get(key) for key in ("local_checkpoint_dir", "source_dir", "target_version"))
        if not isinstance(local, str) or not isinstance(source, str) or not local or not source:
            raise BadRequest("local_checkpoint_dir and source_dir must be strings that are not empty")
        if type(version) is not int or version < 0:
            raise BadRequest("target_version must be a whole number")
        here, there = pathlib.Path(local), pathlib.Path(source)
        try:
            folder = await asyncio.to_thread(pull, here, there, version)
            self.places.add(pulled(here, there))
        except Exception as error:  # the servers of this host go on with what they have
            return AsciiJSON({"success": False, "message": f"{type(error).__name__}: {error}"}, 400)
        return AsciiJSON({"success": True, "message": "Success.", "model_path": str(folder)})
