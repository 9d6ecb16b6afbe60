"""The routes of a rollout server: the embedded engine behind SGLang's HTTP contract, as an ASGI application.

Paths, keys and meanings are those of SGLang 0.5.23, as far as rollouts need them. Media come as the trainer's patches
(`rollout.wire`), not as files. An update of weights does not wait for running samples, which continue under the new
weights. Versions are numbers. The text of a reply comes with its last token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import prometheus_client
from jax.typing import DTypeLike
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from models.config import DecoderConfig
from models.processing import Processor

from .engine import FinishReason, GenerateRequest, TokenChunk
from .jax_engine import JaxEngine
from .requests import TokenStream
from .serve_guard import Guarded, error_handlers, error_json, health_route
from .serve_requests import Body, BodySample, read_body, read_json_object, requests_of
from .serve_weights import WeightRoutes
from .slots import PAGE_TOKENS
from .wire import SERVE_VERSION, BadRequest, Json, finish_json, spans_json

PAUSES = ("abort", "retract", "in_place")
MEMORY = frozenset({"kv_cache", "weights", "cuda_graph"})  # the kinds of memory that sleep frees


class RolloutServer:
    """The routes over one engine; `app` is the application. Weights from disk are cast to `dtype`, which the engine
    serves. Every route but `/health` requires the `token`, if any. `/model_info` and `/server_info` show `info`."""

    def __init__(
        self,
        engine: JaxEngine,
        config: DecoderConfig,
        processor: Processor,
        *,
        dtype: DTypeLike | None = None,
        info: Json | None = None,
        token: str = "",
    ) -> None:
        self._engine, self._config, self._processor = engine, config, processor
        self._info = info or {}
        self._answers: dict[str, SampleAnswer] = {}  # samples in flight, by rid
        self._kept = OrderedDict[str, np.ndarray]()  # media of earlier turns (`wire.completed`)
        self._weights = WeightRoutes(engine, config, dtype, lambda: self._abort(""))
        self._stopping = False
        self._queried = time.monotonic(), engine.stats().tokens_generated  # seconds and tokens at the last `/v1/loads`
        self._metrics = prometheus_client.CollectorRegistry()
        self._metrics.register(_EngineMetrics(engine))
        self.app: ASGIApp = Guarded(
            Starlette(routes=[*self._routes()], exception_handlers=error_handlers()), token, lambda: self._stopping
        )

    def _routes(self) -> Iterator[Route]:
        for path, handler, *methods in (
            ("/generate", self._generate, "POST"),
            ("/abort_request", self._abort_request, "POST"),
            ("/pause_generation", self._pause, "POST"),
            ("/continue_generation", self._continue, "POST"),
            ("/end_session", self._end_session, "POST"),
            ("/release_memory_occupation", self._release_memory, "GET", "POST"),
            ("/resume_memory_occupation", self._resume_memory, "GET", "POST"),
            ("/flush_cache", self._flush_cache, "GET", "POST"),
            ("/model_info", self._model_info, "GET"),
            ("/server_info", self._server_info, "GET"),
            ("/v1/loads", self._loads, "GET"),
            ("/metrics", self._show_metrics, "GET"),
        ):
            yield Route(path, handler, methods=methods)
        yield from (health_route(), health_route("/health_generate"), *self._weights.routes())

    async def stop(self, grace: float) -> None:
        """Takes no more requests, aborts running samples, and waits at most `grace` seconds for their replies."""
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
        for sample in body.samples:
            if sample.rid in self._answers:
                raise BadRequest(f"rid: {sample.rid!r} is in flight already")
        call = Call(body, self._engine, self._processor, self._answers)
        try:
            call.submit(await asyncio.to_thread(requests_of, body, self._config, self._processor, self._kept))
            await self._end(answer for answer in call.answers if answer.aborted or self._stopping)
        except BaseException:
            await call.close()
            raise
        return call

    async def _abort(self, prefix: str) -> None:
        """Aborts all samples whose rid begins with `prefix`: at once, or when they are submitted."""
        found = [answer for rid, answer in self._answers.items() if rid.startswith(prefix)]
        for answer in found:
            answer.aborted = True
        await self._end(found)

    async def _end(self, answers: Iterable[SampleAnswer]) -> None:
        # Aborts all samples together, since each abort waits for the turn in flight.
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
        await self._engine.resume(by_seed=True)  # requests over a network arrive in any order
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _end_session(self, request: Request) -> Response:
        session = read_json_object(await request.body()).get("session_id")
        if not isinstance(session, str) or not session:
            raise BadRequest("session_id must be a string that is not empty")
        await self._engine.end_session(session)
        return Response()

    # --- memory ---------------------------------------------------------------------------------

    async def _release_memory(self, request: Request) -> Response:
        tags = read_json_object(await request.body() or b"{}").get("tags") or list(MEMORY)
        if not isinstance(tags, list) or not set(map(str, tags)) <= MEMORY:
            raise BadRequest(f"tags must be among {', '.join(sorted(MEMORY))}")
        await self._engine.sleep(weights="weights" in tags)
        return JSONResponse(None)

    async def _resume_memory(self, request: Request) -> Response:
        await self._engine.wake()
        return JSONResponse(None)

    async def _flush_cache(self, request: Request) -> Response:
        await self._engine.end_session("")
        return PlainTextResponse("Cache flushed.\n")

    # --- state and settings of the server ---------------------------------------------------------

    async def _model_info(self, request: Request) -> Response:
        vision, version = self._config.vision is not None, str(self._engine.stats().version)
        info = {"is_generation": True, "has_image_understanding": vision, "weight_version": version}
        return JSONResponse(self._info | info)

    async def _server_info(self, request: Request) -> Response:
        device, stats = self._engine.devices[0], self._engine.stats()
        info = {
            "version": SERVE_VERSION,
            "max_running_requests": stats.slots,
            "max_total_tokens": self._engine.cache_usage.pages * PAGE_TOKENS,
            "device": device.platform,
            "device_kind": device.device_kind,
            "tp_size": len(self._engine.devices),
            "vocab_size": self._config.text.vocab_size,
            "weight_version": str(stats.version),
            "asleep": self._engine.asleep,
            "shadows": self._engine.shadows,
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
        return JSONResponse({"version": SERVE_VERSION, "loads": [load]})

    async def _show_metrics(self, request: Request) -> Response:
        text = prometheus_client.generate_latest(self._metrics)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


class _EngineMetrics(Collector):
    """The engine's numbers at the time of a scrape."""

    def __init__(self, engine: JaxEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for family, name, value, text in (
            (GaugeMetricFamily, "running", stats.running, "Samples that hold a slot."),
            (GaugeMetricFamily, "waiting", stats.waiting, "Samples that are queued."),
            (GaugeMetricFamily, "slots", stats.slots, "Samples that can run at once."),
            (GaugeMetricFamily, "weight_version", stats.version, "The version of the weights that are served."),
            (CounterMetricFamily, "tokens", stats.tokens_generated, "Tokens that were generated."),
            (CounterMetricFamily, "prefilled_tokens", stats.tokens_prefilled, "Tokens of prompts that were computed."),
            (CounterMetricFamily, "preemptions", stats.preemptions, "Samples that lost their cache to other samples."),
        ):
            yield family(f"fluxjax_serve_{name}", text, value)


@dataclasses.dataclass
class SampleAnswer:
    """The tokens, log-probs and versions of a sample so far, and the number of tokens sent to the client."""

    sample: BodySample
    engine_id: str = ""  # the sample's id in the engine, for aborts; empty until the sample is submitted
    prompt_tokens: int = 0  # placeholders expanded, tokens generated earlier included
    aborted: bool = False  # perhaps before the sample is submitted
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[tuple[float, int, None]] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    preemptions: int = 0
    told: int = 0  # tokens in the last event
    complete: bool = False  # the final event was made

    def add(self, chunk: TokenChunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += [(logprob, id, None) for logprob, id in zip(chunk.logprobs, chunk.token_ids, strict=True)]
        self.versions += chunk.versions
        self.finish, self.preemptions = chunk.finish, chunk.preemptions

    def due(self) -> bool:
        """Says whether to send an event: for the first token, for `interval` more tokens, or for the end."""
        if self.finish is not None:
            return not self.complete
        return len(self.token_ids) - self.told >= (self.sample.interval if self.told else 1)

    def as_json(self, version: int, processor: Processor) -> Json:
        """Returns the reply, or an event, with all tokens so far. Its text is empty until the sample has ended."""
        self.told, self.complete = len(self.token_ids), self.finish is not None
        meta: Json = {
            "id": self.sample.rid,
            "finish_reason": finish_json(self.finish, self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.told,
            "cached_tokens": 0,
            "weight_version": str(version),
            "input_token_logprobs": [],
            "output_token_logprobs": self.logprobs,
        }
        if self.complete:
            meta["weight_versions"] = spans_json(self.versions)
            meta["num_retractions"] = self.preemptions
        skip = self.sample.skip_special_tokens
        text = processor.decode(self.token_ids, skip_special_tokens=skip) if self.complete else ""
        return {"text": text, "output_ids": self.token_ids, "meta_info": meta}


class Call(Response):
    """The reply to a request to `/generate`, whose samples end with it. Answers are in `in_flight` until `close`."""

    def __init__(self, body: Body, engine: JaxEngine, processor: Processor, in_flight: dict[str, SampleAnswer]) -> None:
        super().__init__()
        self.body, self._engine, self._processor, self._in_flight = body, engine, processor, in_flight
        self.answers = [SampleAnswer(sample) for sample in body.samples]
        in_flight.update((answer.sample.rid, answer) for answer in self.answers)
        self._streams: list[tuple[list[int], TokenStream]] = []
        self._news = asyncio.Event()

    def submit(self, incoming: Sequence[tuple[GenerateRequest, list[int]]]) -> None:
        """Queues all requests in the engine. Raises EngineError for a bad request; `close` ends the queued requests."""
        for request, places in incoming:
            self._streams.append((places, self._engine.generate(request)))
            for index, place in enumerate(places):
                answer = self.answers[place]
                answer.engine_id = f"{request.rid}/{index}"
                answer.prompt_tokens = len(request.prompt) + answer.sample.begun

    async def close(self) -> None:
        """Ends the samples that still run. May be called again."""
        for answer in self.answers:
            self._in_flight.pop(answer.sample.rid, None)
        streams, self._streams = self._streams, []
        for _, stream in streams:
            await stream.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        collecting = [asyncio.create_task(self._collect(places, stream)) for places, stream in self._streams]
        for task in collecting:
            task.add_done_callback(lambda _: self._news.set())
        tasks = [asyncio.create_task(self._reply(collecting, send)), asyncio.create_task(_disconnected(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                await tasks[0]
        finally:
            for task in (*tasks, *collecting):
                task.cancel()
            await asyncio.gather(*tasks, *collecting, return_exceptions=True)
            await self.close()

    async def _collect(self, places: list[int], stream: TokenStream) -> None:
        async for chunk in stream:
            self.answers[places[chunk.sample]].add(chunk)
            self._news.set()

    async def _reply(self, collecting: Sequence[asyncio.Task[None]], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        if not self.body.stream:
            headers = [(b"content-type", b"application/json")]
            await asyncio.gather(*collecting, return_exceptions=True)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._events(collecting, send)
        lost = next((str(task.exception()) for task in collecting if task.exception() is not None), "")
        if self.body.stream:
            end = _event(error_json(lost, 500)) if lost else b""
            await send({"type": "http.response.body", "body": end + b"data: [DONE]\n\n", "more_body": False})
            return
        replies = [self._json(answer) for answer in self.answers]
        content = error_json(lost, 500) if lost else replies if self.body.batch else replies[0]
        await send({"type": "http.response.start", "status": 500 if lost else 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(content).encode(), "more_body": False})

    async def _events(self, collecting: Sequence[asyncio.Task[None]], send: Send) -> None:
        """Sends events as tokens come. Tokens that arrive while a slow client takes an event go into the next event."""
        while True:
            self._news.clear()
            over = all(task.done() for task in collecting)
            for place, answer in enumerate(self.answers):
                if answer.due():
                    event = self._json(answer) | ({"index": place} if self.body.batch else {})
                    await send({"type": "http.response.body", "body": _event(event), "more_body": True})
            if over:
                return
            await self._news.wait()

    def _json(self, answer: SampleAnswer) -> Json:
        return answer.as_json(self._engine.stats().version, self._processor)


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
