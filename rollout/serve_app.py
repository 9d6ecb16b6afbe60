"""The routes of a rollout server: the embedded engine behind SGLang's HTTP contract, as an ASGI application.

Paths, keys and meanings are those of SGLang 0.5.23, as far as rollouts need them. Unlike there, an update of weights
does not wait for running samples, which go on under the new ones; versions are numbers; a reply's text comes with its
last token; and nothing that a client sends ends the server. All routes run on the engine's event loop; JSON and media
of requests are read in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
import prometheus_client
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import models
from models.config import AnyConfig, Qwen25VLConfig
from models.decoder import Decoder
from models.processing import Processor
from sharding.walk import Params
from sharding.weights import map_weights

from .engine import EngineError
from .jax_engine import JaxEngine
from .pages import PAGE_TOKENS
from .serve_calls import Answer, Call, error_response
from .serve_requests import RequestReader, read_body, read_json_object
from .wire import BadRequest, Json

MEDIA_BYTES = 1 << 30
PAUSES = ("abort", "retract", "in_place")
LEFT = 499  # the status that is logged for a client that went away


class RolloutServer:
    """The routes over one engine; `app` is the application.

    `dtype` is what the engine serves; weights from disk are cast to it. With a `token`, every route but `/health` wants
    it. `info` is shown by `/model_info` and `/server_info`.
    """

    def __init__(
        self,
        engine: JaxEngine,
        config: AnyConfig,
        processor: Processor,
        *,
        dtype: DTypeLike | None = None,
        info: Json | None = None,
        token: str = "",
        media_bytes: int = MEDIA_BYTES,
    ) -> None:
        self._engine, self._config, self._processor = engine, config, processor
        self._dtype, self._info = dtype, info or {}
        self._reader = RequestReader(config, processor, media_bytes)
        self._answers: dict[str, Answer] = {}  # of samples in flight, by rid
        self._weights = asyncio.Lock()  # held while weights change or are looked at
        self._stopping = False
        self._queried = time.monotonic(), engine.stats().tokens_generated  # when loads were last asked for
        self._metrics = prometheus_client.CollectorRegistry()
        self._metrics.register(_EngineMetrics(engine))
        handlers = {
            BadRequest: _refused,
            EngineError: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _client_left,
            Exception: _failed,
        }
        self.app: ASGIApp = _Guarded(
            Starlette(routes=self._routes(), exception_handlers=handlers),  # pyright: ignore[reportArgumentType]
            token,
            lambda: self._stopping,
        )

    def _routes(self) -> Iterator[Route]:
        def route(path: str, handler: Callable[[Request], Awaitable[Response]], *methods: str) -> Route:
            return Route(path, handler, methods=methods)

        yield route("/generate", self._generate, "POST")
        yield route("/abort_request", self._abort_request, "POST")
        yield route("/pause_generation", self._pause, "POST")
        yield route("/continue_generation", self._continue, "POST")
        yield route("/update_weights_from_disk", self._update_from_disk, "POST")
        yield route("/update_weight_version", self._update_version, "POST")
        yield route("/weights_checker", self._check_weights, "GET", "POST")
        yield route("/release_memory_occupation", self._release_memory, "GET", "POST")
        yield route("/resume_memory_occupation", self._resume_memory, "GET", "POST")
        yield route("/flush_cache", self._flush_cache, "GET", "POST")
        yield route("/health", self._health, "GET")
        yield route("/health_generate", self._health, "GET")
        yield route("/model_info", self._model_info, "GET")
        yield route("/server_info", self._server_info, "GET")
        yield route("/v1/loads", self._loads, "GET")
        yield route("/metrics", self._show_metrics, "GET")

    async def stop(self, grace: float) -> None:
        """Takes no more requests, and ends those that run as aborted; waits so many seconds for their replies."""
        self._stopping = True
        deadline = time.monotonic() + grace
        try:
            async with asyncio.timeout(grace):
                await self._abort("")
        except TimeoutError:
            return
        while self._answers and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    # --- samples --------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        raw = await request.body()
        eos_ids = self._processor.eos_ids
        body = await asyncio.to_thread(read_body, raw, self._config.text.vocab_size, eos_ids)
        del raw
        call = Call(body, lambda: self._engine.stats().version, self._decode, self._leave)
        for answer in call.answers:
            if answer.sample.rid in self._answers:
                raise BadRequest(f"rid: {answer.sample.rid!r} is in flight already")
        self._answers |= {answer.sample.rid: answer for answer in call.answers}
        try:
            call.submit(await asyncio.to_thread(self._reader.requests, body), self._engine.generate)
            await self._end(answer for answer in call.answers if answer.aborted or self._stopping)
        except BaseException:
            await call.close()
            raise
        return call

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._processor.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _leave(self, call: Call) -> None:
        for answer in call.answers:
            self._answers.pop(answer.sample.rid, None)

    async def _abort(self, prefix: str) -> None:
        """Ends all samples whose rid begins like that; those that are not submitted yet, as soon as they are."""
        found = [answer for rid, answer in self._answers.items() if rid.startswith(prefix)]
        for answer in found:
            answer.aborted = True
        await self._end(found)

    async def _end(self, answers: Iterable[Answer]) -> None:
        # All at once: each waits for the turn in flight.
        await asyncio.gather(*(self._engine.abort(answer.engine_id) for answer in answers if answer.engine_id))

    async def _abort_request(self, request: Request) -> Response:
        body = read_json_object(await request.body())
        rid = body.get("rid")
        if body.get("abort_all") is not True and (not isinstance(rid, str) or not rid):
            raise BadRequest("rid must be a string that is not empty, unless abort_all is true")
        await self._abort("" if body.get("abort_all") is True else str(rid))
        return Response()

    async def _pause(self, request: Request) -> Response:
        mode = read_json_object(await request.body()).get("mode", "abort")
        if mode not in PAUSES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSES)}")
        await self._engine.pause()
        if mode == "abort":
            await self._abort("")
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        read_json_object(await request.body())
        await self._engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    # --- weights and memory ---------------------------------------------------------------------

    async def _update_from_disk(self, request: Request) -> Response:
        body = read_json_object(await request.body())
        folder = body.get("model_path")
        if not isinstance(folder, str) or not folder:
            raise BadRequest("model_path must be a string that is not empty")
        version = None if body.get("weight_version") is None else weight_version(body["weight_version"])
        try:
            async with self._weights:
                if body.get("abort_all_requests") is True:
                    await self._abort("")
                loaded = await asyncio.to_thread(models.load, folder, self._dtype, _on_host)
                params = models.split(loaded)[1]
                del loaded
                await self._engine.update_weights(self._version if version is None else version, params)
        except Exception as error:  # whatever is wrong with a folder, the server goes on with the weights that it has
            message = f"{folder}: {type(error).__name__}: {error}"
            return JSONResponse({"success": False, "message": message, "num_paused_requests": 0}, 400)
        message = f"Weights of {folder} are served as version {self._version}."
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})

    async def _update_version(self, request: Request) -> Response:
        body = read_json_object(await request.body())
        version = weight_version(body.get("new_version"), "new_version")
        async with self._weights:
            if body.get("abort_all_requests") is True:
                await self._abort("")
            await self._engine.rename_weights(version)
        message = f"Weight version updated to {version}"
        return JSONResponse({"success": True, "message": message, "new_version": str(version)})

    async def _check_weights(self, request: Request) -> Response:
        action = read_json_object(await request.body()).get("action", "checksum")
        if action != "checksum":
            return JSONResponse(
                {"success": False, "message": f"action {action!r} is not known; there is checksum"}, 400
            )
        async with self._weights:
            tensors = await self._engine.disk_tensors()
            checksums = await asyncio.to_thread(_checksums, tensors)
        whole = "".join(name + checksums[name] for name in sorted(checksums))
        size = len(self._engine.devices)
        place = {"role": "target", "tp_rank": 0, "tp_size": size, "dp_rank": 0, "dp_size": 1, "pp_rank": 0,
                 "pp_size": 1, "rank": 0, "size": 1}  # fmt: skip
        rank = {
            "checksums": checksums,
            "per_gpu_checksum": hashlib.sha256(whole.encode()).hexdigest(),
            "parallelism_info": [place],
        }
        return JSONResponse({"success": True, "message": "Success.", "ranks": [rank]})

    async def _release_memory(self, request: Request) -> Response:
        await self._engine.sleep()
        return JSONResponse(None)

    async def _resume_memory(self, request: Request) -> Response:
        await self._engine.wake()
        return JSONResponse(None)

    async def _flush_cache(self, request: Request) -> Response:
        return PlainTextResponse("Cache flushed.\n")  # there is none beyond the samples that run

    # --- what the server is and does ------------------------------------------------------------

    @property
    def _version(self) -> int:
        return self._engine.stats().version

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _model_info(self, request: Request) -> Response:
        vision = isinstance(self._config, Qwen25VLConfig)
        info = {"is_generation": True, "has_image_understanding": vision, "weight_version": str(self._version)}
        return JSONResponse(self._info | info)

    async def _server_info(self, request: Request) -> Response:
        device = self._engine.devices[0]
        info = {
            "version": "fluxjax",
            "max_running_requests": self._engine.stats().slots,
            "max_total_tokens": self._engine.cache_usage.pages * PAGE_TOKENS,
            "device": device.platform,
            "device_kind": device.device_kind,
            "tp_size": len(self._engine.devices),
            "vocab_size": self._config.text.vocab_size,
            "weight_version": str(self._version),
        }
        return JSONResponse(self._info | info)

    async def _loads(self, request: Request) -> Response:
        stats, now = self._engine.stats(), time.monotonic()
        then, tokens = self._queried
        self._queried = now, stats.tokens_generated
        load = {
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "max_running_requests": stats.slots,
            "max_total_num_tokens": self._engine.cache_usage.pages * PAGE_TOKENS,
            "gen_throughput": (stats.tokens_generated - tokens) / max(now - then, 1e-9),
        }
        return JSONResponse({"version": "fluxjax", "loads": [load]})

    async def _show_metrics(self, request: Request) -> Response:
        text = prometheus_client.generate_latest(self._metrics)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


class _Guarded:
    """Answers 401 to those without the token, and 503 to all while the server stops."""

    def __init__(self, app: ASGIApp, token: str, stopping: Callable[[], bool]) -> None:
        self._app, self._stopping = app, stopping
        self._wanted = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: Response | None = None
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if self._stopping():
            refusal = error_response("the server is shutting down", 503)
        elif self._wanted and scope.get("path") != "/health" and not hmac.compare_digest(given, self._wanted):
            refusal = error_response("Authorization: Bearer TOKEN is wanted, with the token of this server", 401)
        await (refusal or self._app)(scope, receive, send)


class _EngineMetrics(Collector):
    """The engine's numbers at the time of a scrape."""

    def __init__(self, engine: JaxEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        gauges = {
            "running": (stats.running, "Samples that hold a slot."),
            "waiting": (stats.waiting, "Samples that are queued."),
            "slots": (stats.slots, "Samples that can run at once."),
            "weight_version": (stats.version, "The version of the weights that are served."),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"fluxjax_serve_{name}", text, value)
        counters = {
            "tokens": (stats.tokens_generated, "Tokens that were generated."),
            "prefilled_tokens": (stats.tokens_prefilled, "Tokens of prompts that were computed."),
            "preemptions": (stats.preemptions, "Samples that lost their cache to others."),
        }
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"fluxjax_serve_{name}", text, value)


def weight_version(text: object, name: str = "weight_version") -> int:
    """The number that a version says in decimal digits, as it would be written again. Raises BadRequest."""
    if not isinstance(text, str) or not text.isdecimal() or len(text) > 18 or str(int(text)) != text:
        raise BadRequest(f'{name} must be a string with a number in decimal digits, as "7"')
    return int(text)


def _on_host(model: Decoder) -> Params:
    """The shardings of weights from disk. On the host, if JAX has it: the engine then moves them to its devices piece
    by piece, and frees the old ones as it does."""
    try:
        place = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS=cuda
        place = jax.local_devices()[0]
    return map_weights(lambda *_: SingleDeviceSharding(place), model)


def _checksums(tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.tobytes()).hexdigest()[:16] for name, tensor in tensors}


async def _refused(request: Request, error: Exception) -> Response:
    return error_response(str(error), 400)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return error_response(error.detail, error.status_code)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=LEFT)


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(f"{type(error).__name__}: {error}", 500)
