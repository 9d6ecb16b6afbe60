"""Rollout servers behind proxies that do what networks and servers do on bad days, by a script that the test gives.

The servers are real, `rollout.serve`'s application under uvicorn, and run with their proxies in a thread of this
process. A test appends `Fault`s to `FaultyProxy.script`; each call of a fault's route takes one.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from protocol_cases import model, processor
from rollout_cases import HANG, engine
from serve_cases import answering

from rollout.jax_engine import JaxEngine
from rollout.serve_app import RolloutServer

Json = dict[str, Any]
Result = TypeVar("Result")
LATE = 1.0  # seconds
FOREIGN = 424242  # a version that nobody gives
DONE = b"data: [DONE]"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to one call of `route`. In a stream, to the first event from number `at` on that it can happen to;
    `kind` is a key of `EVENT_FAULTS` or one of `FaultyProxy`'s own."""

    kind: str
    at: int = 0
    route: str = "/generate"


def _ends(event: Json, **finish: Any) -> None:
    meta = event["meta_info"]
    meta["finish_reason"] = finish
    meta["weight_versions"] = [{"version": meta["weight_version"], "start": 0, "end": len(event["output_ids"])}]


def spoil(event: Json, kind: str) -> None:
    """Does to an event what a key of `EVENT_FAULTS` says."""
    meta, logprobs = event["meta_info"], event["meta_info"].get("output_token_logprobs", [])

    def set_token(place: int, id: Any) -> None:
        event["output_ids"][place] = logprobs[place][1] = id

    def set_span(**changes: Any) -> None:
        (span,) = meta["weight_versions"]
        meta["weight_versions"] = [span | changes]

    match kind:
        case "another id":
            meta["id"] = "somebody-else"
        case "index out of range":
            event["index"] = 99
        case "index of a neighbour":
            event["index"] += 1
        case "no log-probs":
            del meta["output_token_logprobs"]
        case "few log-probs":
            logprobs.pop()
        case "log-prob NaN":
            logprobs[-1][0] = float("nan")
        case "log-prob without end":
            logprobs[-1][0] = -(10**400)
        case "log-prob of another token":
            logprobs[-1][1] += 1
        case "token beyond the vocabulary":
            set_token(-1, 10**6)
        case "no token":
            set_token(-1, True)
        case "forbidden token":
            set_token(-1, processor("text").media_token_ids[0])
        case "tokens that change":
            set_token(0, (event["output_ids"][0] + 1) % 8)
        case "early end":
            _ends(event, type="length", length=0)
        case "early stop":
            _ends(event, type="stop", matched=1)
        case "stop without a token":
            event["output_ids"], meta["output_token_logprobs"], meta["completion_tokens"] = [], [], 0
            _ends(event, type="stop", matched=None)
            meta["weight_versions"] = []
        case "abort that nobody asked for":
            _ends(event, type="abort", status_code=None)
        case "abort of a failure":
            _ends(event, type="abort", status_code=500, message="out of memory")
        case "strange finish":
            meta["finish_reason"] = "done"
        case "no versions":
            del meta["weight_versions"]
        case "gap in the versions":
            set_span(start=1)
        case "few versions":
            set_span(end=meta["weight_versions"][0]["end"] - 1)
        case "foreign version":
            set_span(version=str(FOREIGN))


WHENEVER: Callable[[Json, int], bool] = lambda event, sent: True  # noqa: E731
UNDER_WAY: Callable[[Json, int], bool] = lambda event, sent: event["meta_info"]["finish_reason"] is None  # noqa: E731
AT_ITS_END: Callable[[Json, int], bool] = lambda event, sent: not UNDER_WAY(event, sent)  # noqa: E731

# The events that a fault can happen to (by the event, and the tokens of its sample that were sent before), and what a
# client says of it.
EVENT_FAULTS: dict[str, tuple[Callable[[Json, int], bool], str]] = {
    "another id": (WHENEVER, "for 'somebody-else', not for"),
    "index out of range": (WHENEVER, "index 99, but"),
    "index of a neighbour": (WHENEVER, "index|not for"),
    "no log-probs": (WHENEVER, "no output_ids or no output_token_logprobs"),
    "few log-probs": (WHENEVER, r"ids, \d+ log-probs"),
    "log-prob NaN": (WHENEVER, r"an impossible log-prob \[nan"),
    "log-prob without end": (WHENEVER, r"an impossible log-prob \[-1000"),
    "log-prob of another token": (WHENEVER, "an impossible log-prob .* for token"),
    "token beyond the vocabulary": (WHENEVER, "token 1000000, which is not in the vocabulary"),
    "no token": (WHENEVER, "token True, which is not in the vocabulary"),
    "forbidden token": (WHENEVER, "token .* which was forbidden"),
    "tokens that change": (lambda event, sent: sent > 0, "other first tokens"),
    "early end": (UNDER_WAY, "an end by length at"),
    "early stop": (UNDER_WAY, "an end at token .* not among the request's stop_ids"),
    "stop without a token": (lambda event, sent: sent == 0, "an end at token None"),
    "abort that nobody asked for": (UNDER_WAY, "aborted .* samples, which nobody asked for"),
    "abort of a failure": (UNDER_WAY, "abort with status 500: out of memory"),
    "strange finish": (WHENEVER, "an unknown finish reason 'done'"),
    "no versions": (AT_ITS_END, "weight_versions None"),
    "gap in the versions": (AT_ITS_END, "weight_versions"),
    "few versions": (AT_ITS_END, "weight_versions .* do not cover"),
    "foreign version": (AT_ITS_END, f"{FOREIGN}"),
}


def can_happen(kind: str, event: Json, sent: Mapping[int, int]) -> bool:
    """Says whether a fault can happen to an event, or to the end of a stream, which is an empty one."""
    if kind != "twice" and kind not in EVENT_FAULTS:
        return True
    condition = AT_ITS_END if kind == "twice" else EVENT_FAULTS[kind][0]
    return bool(event) and condition(event, sent[event.get("index", 0)])


STREAM_FAULTS: dict[str, str] = {
    "cut": "broke off|without .DONE.|not JSON",  # in the middle of an event
    "closed": r"broke off|without .DONE.",  # between two events
    "ended": r"without .DONE.",  # as a reply that is complete ends
    "twice": "a second end of sample",
    "status 500": "status 500",
    "status 503": "status 503",
    "no JSON": "not JSON",
}
ORDER_FAULTS = ("status 500", "cut", "no JSON", "nonsense")


class FaultyProxy:
    """One proxy, in front of the server at `upstream`. `script` and `forever` are set from any thread."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.script: collections.deque[Fault] = collections.deque()
        self.forever: Fault | None = None  # at each call of its route
        self.fired: list[str] = []  # kinds of faults that happened
        self.calls: collections.Counter[str] = collections.Counter()  # by route
        self.address = ""

    def reset(self) -> None:
        self.script.clear()
        self.forever = None
        self.fired.clear()
        self.calls.clear()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FaultyProxy]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listening).start()
        self.address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            async with aiohttp.ClientSession(
                self._upstream, connector=aiohttp.TCPConnector(limit=0, force_close=True)
            ) as self._client:
                yield self
        finally:
            await runner.cleanup()

    def _next(self, route: str) -> Fault | None:
        if self.forever is not None and self.forever.route == route:
            return self.forever
        fault = next((fault for fault in self.script if fault.route == route), None)
        if fault is not None:
            self.script.remove(fault)
        return fault

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.calls[request.path] += 1
        fault, body = self._next(request.path), await request.read()
        kind = "" if fault is None else fault.kind
        refuses = kind.startswith("status ")
        if request.path == "/generate" and not refuses:
            return await self._stream(request, body, fault)
        if kind:
            self.fired.append(kind)
        if refuses:
            return web.Response(status=int(kind.removeprefix("status ")), text="a bad day")
        if kind == "stall":
            return await self._stall(request)
        if kind == "nothing done":
            return web.json_response({"success": True, "message": "Certainly."})
        if kind == "late":
            await asyncio.sleep(LATE)
        async with self._client.request(request.method, request.path, data=body or None) as reply:
            data, status = await reply.read(), reply.status
        if kind == "cut":
            return await self._cut(request, data)
        data = {"no JSON": b"{ranks: [", "nonsense": b'{"ranks": [1], "loads": [2]}'}.get(kind, data)
        return web.Response(body=data, status=status, content_type="application/json")

    async def _cut(self, request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data) + 1)})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        _hang_up(request)
        return response

    async def _stall(self, request: web.Request) -> web.StreamResponse:
        """Says nothing until the client gives up."""
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.02)
        return web.Response()

    async def _stream(self, request: web.Request, body: bytes, fault: Fault | None) -> web.StreamResponse:
        response = web.StreamResponse()
        sent: collections.Counter[int] = collections.Counter()  # tokens, by sample
        number, silent = 0, -1  # events, and the sample of which no more are sent
        async with self._client.post("/generate", data=body) as reply:
            if reply.status != 200:
                return web.Response(status=reply.status, body=await reply.read())
            await response.prepare(request)
            async for line in reply.content:
                if not (line := line.strip()):
                    continue
                if request.transport is None or request.transport.is_closing():
                    return response
                event = {} if line == DONE else json.loads(line.removeprefix(b"data: "))
                if fault is not None and number >= fault.at and can_happen(fault.kind, event, sent):
                    self.fired.append(fault.kind)
                    match fault.kind:
                        case "stall":
                            await self._stall(request)
                            return response
                        case "cut" | "closed":
                            await response.write(line[: len(line) // 2] if fault.kind == "cut" else b"")
                            _hang_up(request)
                            return response
                        case "ended":
                            return response
                        case "no JSON":
                            line = b"data: {what?"
                        case "twice":
                            line += b"\n\n" + line
                        case kind:
                            spoil(event, kind)
                            silent = event["index"] if kind == "abort that nobody asked for" else -1
                            line = b"data: " + json.dumps(event).encode()
                    fault = None
                elif event and event["index"] == silent:
                    continue
                with contextlib.suppress(ConnectionError):  # the client has heard enough
                    await response.write(line + b"\n\n")
                number += 1
                if event:
                    sent[event.get("index", 0)] = len(event["output_ids"])
        return response


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort() if request.content_length is None else request.transport.close()


class Servers:
    """Some servers and their proxies, in a thread of their own."""

    def __init__(self, count: int, kind: str = "text", **sizes: Any) -> None:
        """`sizes` are those of the engines."""
        self._count, self._kind, self._sizes = count, kind, sizes
        self.upstream: list[str] = []  # addresses of the servers themselves
        self.proxies: list[FaultyProxy] = []
        self.engines: list[JaxEngine] = []
        self.servers: list[RolloutServer] = []
        self._loop = asyncio.new_event_loop()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs where the servers do."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG)

    @contextlib.contextmanager
    def running(self) -> Iterator[Servers]:
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._over = asyncio.Event()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(ready))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            ready.result(HANG)
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._over.set)
            thread.join(HANG)

    async def _serve(self, ready: concurrent.futures.Future[None]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(self._count):
                self.engines.append(engine(model(self._kind), **self._sizes))
                server = RolloutServer(self.engines[-1], model(self._kind).config, processor(self._kind))
                self.servers.append(server)
                self.upstream.append(await stack.enter_async_context(answering(self.engines[-1], server)))
                self.proxies.append(await stack.enter_async_context(FaultyProxy(self.upstream[-1]).running()))
            ready.set_result(None)
            await self._over.wait()

    def reset(self) -> None:
        for proxy in self.proxies:
            proxy.reset()

    @property
    def addresses(self) -> list[str]:
        return [proxy.address for proxy in self.proxies]
