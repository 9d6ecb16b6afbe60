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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import aiohttp
import uvicorn
from aiohttp import web
from protocol_cases import model, processor
from rollout_cases import HANG

from rollout.jax_engine import JaxEngine
from rollout.requests import EngineLimits
from rollout.serve_app import RolloutServer

Json = dict[str, Any]
Result = TypeVar("Result")
SLOTS, LONGEST = 16, 64
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


def _id(event: Json) -> None:
    event["meta_info"]["id"] = "somebody-else"


def _index(event: Json) -> None:
    event["index"] = 99


def _neighbour(event: Json) -> None:
    event["index"] += 1


def _no_logprobs(event: Json) -> None:
    del event["meta_info"]["output_token_logprobs"]


def _few_logprobs(event: Json) -> None:
    event["meta_info"]["output_token_logprobs"].pop()


def _nan_logprob(event: Json) -> None:
    event["meta_info"]["output_token_logprobs"][-1][0] = float("nan")


def _huge_logprob(event: Json) -> None:
    event["meta_info"]["output_token_logprobs"][-1][0] = -(10**400)


def _logprob_of_another(event: Json) -> None:
    event["meta_info"]["output_token_logprobs"][-1][1] += 1


def _set_token(event: Json, place: int, id: Any) -> None:
    event["output_ids"][place] = event["meta_info"]["output_token_logprobs"][place][1] = id


def _vocabulary(event: Json) -> None:
    _set_token(event, -1, 10**6)


def _not_a_token(event: Json) -> None:
    _set_token(event, -1, True)


def _forbidden(event: Json) -> None:
    _set_token(event, -1, processor("text").media_token_ids[0])


def _other_tokens(event: Json) -> None:
    _set_token(event, 0, (event["output_ids"][0] + 1) % 8)


def _ends(event: Json, finish: Json) -> None:
    meta = event["meta_info"]
    meta["finish_reason"] = finish
    meta["weight_versions"] = [{"version": meta["weight_version"], "start": 0, "end": len(event["output_ids"])}]


def _early_end(event: Json) -> None:
    _ends(event, {"type": "length", "length": 0})


def _early_stop(event: Json) -> None:
    _ends(event, {"type": "stop", "matched": 1})


def _empty_stop(event: Json) -> None:
    event["output_ids"], event["meta_info"]["output_token_logprobs"] = [], []
    event["meta_info"]["completion_tokens"] = 0
    _ends(event, {"type": "stop", "matched": None})
    event["meta_info"]["weight_versions"] = []


def _own_abort(event: Json) -> None:
    _ends(event, {"type": "abort", "status_code": None})


def _failed_abort(event: Json) -> None:
    _ends(event, {"type": "abort", "status_code": 500, "message": "out of memory"})


def _strange_finish(event: Json) -> None:
    event["meta_info"]["finish_reason"] = "done"


def _no_versions(event: Json) -> None:
    del event["meta_info"]["weight_versions"]


def _gap_in_versions(event: Json) -> None:
    (span,) = event["meta_info"]["weight_versions"]
    event["meta_info"]["weight_versions"] = [span | {"start": 1}]


def _few_versions(event: Json) -> None:
    (span,) = event["meta_info"]["weight_versions"]
    event["meta_info"]["weight_versions"] = [span | {"end": span["end"] - 1}]


def _foreign_version(event: Json) -> None:
    (span,) = event["meta_info"]["weight_versions"]
    event["meta_info"]["weight_versions"] = [span | {"version": str(FOREIGN)}]


def _sent_before(event: Json, sent: int) -> bool:
    return sent > 0


def _under_way(event: Json, sent: int) -> bool:
    return event["meta_info"]["finish_reason"] is None


def _at_its_end(event: Json, sent: int) -> bool:
    return event["meta_info"]["finish_reason"] is not None


def _any(event: Json, sent: int) -> bool:
    return True


# What is done to an event, which it can be done to (by the event, and the tokens of its sample that were sent before),
# and what a client says of it.
EVENT_FAULTS: dict[str, tuple[Callable[[Json], None], Callable[[Json, int], bool], str]] = {
    "another id": (_id, _any, "an answer to 'somebody-else', not"),
    "index out of range": (_index, _any, "index 99 of"),
    "index of a neighbour": (_neighbour, _any, "index|an answer to"),
    "no log-probs": (_no_logprobs, _any, "no output_ids or no output_token_logprobs"),
    "few log-probs": (_few_logprobs, _any, r"ids, \d+ log-probs"),
    "log-prob NaN": (_nan_logprob, _any, r"a log-prob \[nan"),
    "log-prob without end": (_huge_logprob, _any, r"a log-prob \[-1000"),
    "log-prob of another token": (_logprob_of_another, _any, "a log-prob .* of token"),
    "token beyond the vocabulary": (_vocabulary, _any, "token 1000000 of a vocabulary"),
    "no token": (_not_a_token, _any, "token True of a vocabulary"),
    "forbidden token": (_forbidden, _any, "token .* which was forbidden"),
    "tokens that change": (_other_tokens, _sent_before, "that were others before"),
    "early end": (_early_end, _under_way, "an end by length at"),
    "early stop": (_early_stop, _under_way, "an end at token .* of its own accord"),
    "stop without a token": (_empty_stop, lambda event, sent: sent == 0, "an end at token None"),
    "abort that nobody asked for": (_own_abort, _under_way, "aborted .* samples, which nobody asked for"),
    "abort of a failure": (_failed_abort, _under_way, "abort with status 500: out of memory"),
    "strange finish": (_strange_finish, _any, "a finish reason 'done'"),
    "no versions": (_no_versions, _at_its_end, "weight_versions None"),
    "gap in the versions": (_gap_in_versions, _at_its_end, "weight_versions"),
    "few versions": (_few_versions, _at_its_end, "weight_versions .* for"),
    "foreign version": (_foreign_version, _at_its_end, f"{FOREIGN}"),
}
STREAM_FAULTS: dict[str, str] = {
    "cut": "broke off|without .DONE.|not JSON",  # in the middle of an event
    "closed": r"broke off|without .DONE.",  # between two events
    "ended": r"without .DONE.",  # as a reply that is complete ends
    "twice": "ended twice",
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
        if fault is not None and fault.kind.startswith("status "):
            self.fired.append(fault.kind)
            return web.Response(status=int(fault.kind.removeprefix("status ")), text="a bad day")
        if request.path == "/generate":
            return await self._stream(request, body, fault)
        if fault is not None and fault.kind == "stall":
            return await self._stall(request, fault)
        if fault is not None and fault.kind == "nothing done":
            self.fired.append(fault.kind)
            return web.json_response({"success": True, "message": "Certainly."})
        if fault is not None and fault.kind == "late":
            self.fired.append(fault.kind)
            await asyncio.sleep(LATE)
            fault = None
        async with self._client.request(request.method, request.path, data=body or None) as reply:
            data, status = await reply.read(), reply.status
        if fault is not None:
            self.fired.append(fault.kind)
            if fault.kind == "cut":
                return await self._cut(request, data)
            data = {"no JSON": b"{ranks: [", "nonsense": b'{"ranks": [1], "loads": [2]}'}[fault.kind]
        return web.Response(body=data, status=status, content_type="application/json")

    async def _cut(self, request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data) + 1)})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        _hang_up(request)
        return response

    async def _stall(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        """Says nothing until the client gives up."""
        self.fired.append(fault.kind)
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
                if fault is not None and number >= fault.at:
                    kind, before = fault.kind, sent[event.get("index", 0)]
                    if kind == "stall":
                        return await self._stall_in(request, fault, response)
                    if kind in ("cut", "closed"):
                        self.fired.append(kind)
                        await response.write(line[: len(line) // 2] if kind == "cut" else b"")
                        _hang_up(request)
                        return response
                    if kind == "ended":
                        self.fired.append(kind)
                        return response
                    if kind == "no JSON":
                        self.fired.append(kind)
                        line, fault = b"data: {what?", None
                    elif event and kind == "twice" and _at_its_end(event, before):
                        self.fired.append(kind)
                        line, fault = line + b"\n\n" + line, None
                    elif event and kind in EVENT_FAULTS and EVENT_FAULTS[kind][1](event, before):
                        self.fired.append(kind)
                        EVENT_FAULTS[kind][0](event)
                        silent = event["index"] if kind == "abort that nobody asked for" else -1
                        line, fault = b"data: " + json.dumps(event).encode(), None
                elif event and event["index"] == silent:
                    continue
                with contextlib.suppress(ConnectionError):  # the client has heard enough
                    await response.write(line + b"\n\n")
                number += 1
                if event:
                    sent[event.get("index", 0)] = len(event["output_ids"])
        return response

    async def _stall_in(self, request: web.Request, fault: Fault, response: web.StreamResponse) -> web.StreamResponse:
        await self._stall(request, fault)
        return response


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort() if request.content_length is None else request.transport.close()


def limits() -> EngineLimits:
    return EngineLimits(SLOTS, LONGEST, model("text").config.text.vocab_size)


def engine() -> JaxEngine:
    return JaxEngine(model("text"), slots=SLOTS, max_sequence_tokens=LONGEST, steps_per_sync=3)


class Servers:
    """Some servers and their proxies, in a thread of their own."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.proxies: list[FaultyProxy] = []
        self.engines: list[JaxEngine] = []
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
                self.engines.append(engine())
                upstream = await stack.enter_async_context(_served(self.engines[-1]))
                self.proxies.append(await stack.enter_async_context(FaultyProxy(upstream).running()))
            ready.set_result(None)
            await self._over.wait()

    def reset(self) -> None:
        for proxy in self.proxies:
            proxy.reset()

    @property
    def addresses(self) -> list[str]:
        return [proxy.address for proxy in self.proxies]


@contextlib.asynccontextmanager
async def _served(serving: JaxEngine) -> AsyncIterator[str]:
    server = RolloutServer(serving, model("text").config, processor("text"))
    listening = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn.Config(server.app, log_config=None, lifespan="off", ws="none", access_log=False))
    task = asyncio.create_task(http.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await server.stop(1)
        http.should_exit = True
        await task
        await serving.close()
