"""The routes of a rollout server that change or check weights.

A version comes from a folder of this host, from one that hosts share (`/pull_weights`, which only forks of SGLang
have), or in buckets, which take effect together, at the end.
"""

import asyncio
import base64
import binascii
import hashlib
import pathlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
from jax.typing import DTypeLike
from safetensors import deserialize
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import models
from models.config import DecoderConfig
from models.folder import write_json
from models.hf import SINGLE, StoredTensor, write_weights
from models.registry import write_config

from .engine_weights import on_host, served
from .jax_engine import JaxEngine
from .serve_guard import AsciiJSON
from .serve_requests import read_json_object
from .weights.agent import pull_route
from .weights.published import scratch_folder, sha256
from .weights.version_folders import DTYPES
from .wire import BadRequest, Json

Handler = Callable[[Json], Awaitable[Json]]


class WeightRoutes:
    """The routes for an engine's weights, which are cast to `dtype`. `abort_all` aborts all samples."""

    def __init__(
        self,
        engine: JaxEngine,
        config: DecoderConfig,
        dtype: DTypeLike | None,
        abort_all: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine, self._config, self._dtype, self._abort_all = engine, served(config), dtype, abort_all
        self._lock = asyncio.Lock()  # held while weights are changed or checked
        self._session: dict[str, np.ndarray] | None = None  # tensors of the buckets so far; None: no update is open
        self._session_version: int | None = None

    def routes(self) -> Iterator[Route]:
        for path, handler in (
            ("/update_weights_from_disk", self._from_disk),
            ("/begin_weight_update", self._begin),
            ("/update_weights_from_tensor", self._from_tensors),
            ("/end_weight_update", self._end),
        ):
            yield Route(path, self._reported(handler), methods=["POST"])
        yield pull_route(set())
        yield Route("/weights_checker", self._check, methods=["GET", "POST"])

    def _reported(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Answers errors of `handler` with a message; then the server goes on with the weights that it has."""

        async def handle(request: Request) -> Response:
            body = read_json_object(await request.body())
            try:
                async with self._lock:
                    answer = await handler(body)
            except BadRequest:
                raise
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                return AsciiJSON({"success": False, "message": message, "num_paused_requests": 0}, 400)
            return AsciiJSON({"success": True, "num_paused_requests": 0, **answer})

        return handle

    async def _from_disk(self, body: Json) -> Json:
        folder = body.get("model_path")
        if not isinstance(folder, str) or not folder:
            raise BadRequest("model_path must be a string that is not empty")
        version = given_version(body)
        await self._abort_if_asked(body)
        try:
            await self._serve(folder, version)
        except Exception as error:
            raise RuntimeError(f"{folder}: {type(error).__name__}: {error}") from error
        return {"message": f"Weights of {folder} are served as version {self._engine.stats().version}."}

    async def _begin(self, body: Json) -> Json:
        self._session, self._session_version = {}, None  # drops the buckets of an unfinished update
        return {"message": "Success"}

    async def _from_tensors(self, body: Json) -> Json:
        if self._session is None:
            raise RuntimeError("no update is open; /begin_weight_update opens one")
        given, kind = body.get("serialized_named_tensors"), body.get("load_format")
        if not isinstance(given, list) or not given or not isinstance(given[0], str) or kind != "safetensors":
            raise BadRequest("serialized_named_tensors must be strings in base64, load_format safetensors")
        try:
            data = await asyncio.to_thread(base64.b64decode, given[0], validate=True)
        except binascii.Error as error:
            raise BadRequest(f"serialized_named_tensors: {error}") from None
        version = given_version(body)
        self._session |= await asyncio.to_thread(_tensors, data)
        self._session_version = self._session_version if version is None else version
        return {"message": "Success"}

    async def _end(self, body: Json) -> Json:
        if self._session is None:
            raise RuntimeError("no update is open; /begin_weight_update opens one")
        tensors, self._session = self._session, None
        if tensors:
            await self._abort_if_asked(body)
            with tempfile.TemporaryDirectory(dir=scratch_folder()) as folder:
                held = await self._engine.disk_tensors() if self._engine.has_weights else ()
                await asyncio.to_thread(self._write, pathlib.Path(folder), dict(held), tensors)
                del held, tensors
                await self._serve(folder, self._session_version)
        return {"message": "Success"}

    def _write(self, folder: pathlib.Path, held: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> None:
        if unknown := sorted(new.keys() - held.keys()):
            raise ValueError(f"{unknown[0]}: no tensor of this model; among its tensors is {min(held)}")
        tensors = sorted((held | new).items(), key=lambda entry: -entry[1].itemsize)  # wide dtypes first, for alignment
        contents = [StoredTensor(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        write_weights(folder / SINGLE, contents, (tensor for _, tensor in tensors))
        write_json(folder / "config.json", write_config(self._config))

    async def _serve(self, folder: str, version: int | None) -> None:
        loaded = await asyncio.to_thread(models.load, folder, self._dtype, on_host)
        params = models.split(loaded)[1]
        del loaded
        await self._engine.update_weights(self._engine.stats().version if version is None else version, params)

    async def _check(self, request: Request) -> Response:
        action = read_json_object(await request.body()).get("action", "checksum")
        if action != "checksum":
            return AsciiJSON(
                {"success": False, "message": f"action {action!r} is not known; the only action is checksum"}, 400
            )
        async with self._lock:
            tensors = await self._engine.disk_tensors()
            checksums = await asyncio.to_thread(lambda: {name: sha256([tensor]) for name, tensor in tensors})
        whole = "".join(name + checksums[name] for name in sorted(checksums))
        size = len(self._engine.devices)
        place = {"role": "target", "tp_rank": 0, "tp_size": size, "dp_rank": 0, "dp_size": 1, "pp_rank": 0,
                 "pp_size": 1, "rank": 0, "size": 1}  # fmt: skip
        rank = {
            "checksums": checksums,
            "per_gpu_checksum": hashlib.sha256(whole.encode()).hexdigest(),
            "parallelism_info": [place],
        }
        return AsciiJSON({"success": True, "message": "Success.", "ranks": [rank]})

    async def _abort_if_asked(self, body: Json) -> None:
        if body.get("abort_all_requests") is True:
            await self._abort_all()


def _tensors(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file. Raises SafetensorError, and KeyError for a dtype that no weight has."""
    return {
        name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in deserialize(data)
    }


def given_version(body: Json) -> int | None:
    """The `weight_version` of a body: decimal digits without leading zeros. Raises BadRequest."""
    text = body.get("weight_version")
    if text is None:
        return None
    if not isinstance(text, str) or not text.isdecimal() or len(text) > 18 or str(int(text)) != text:
        raise BadRequest('weight_version must be a string with a number in decimal digits, as "7"')
    return int(text)
