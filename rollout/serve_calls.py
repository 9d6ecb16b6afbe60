"""One call of `POST /generate` under way: collects its samples' tokens, and makes the reply of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .engine import FinishReason, TokenChunk
from .requests import TokenStream
from .serve_requests import Body, BodySample
from .wire import Incoming, Json, finish_json, spans_json


def error_json(message: str, status: int) -> Json:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


class AsciiJSON(JSONResponse):
    """JSON in ASCII: it can repeat any text of a client, half of a surrogate pair, too."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def error_response(message: str, status: int) -> JSONResponse:
    return AsciiJSON(error_json(message, status), status)


@dataclasses.dataclass
class SampleAnswer:
    """The tokens, log-probs and versions of a sample so far, and the number of tokens sent to the client."""

    sample: BodySample
    engine_id: str = ""  # the id for aborting it in the engine; empty until it was submitted
    prompt_tokens: int = 0  # placeholders expanded, tokens begun earlier included
    aborted: bool = False  # perhaps before its submission
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[tuple[float, int, None]] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    preemptions: int = 0
    told: int = 0  # tokens in the last event
    complete: bool = False  # the last event was the final one

    def add(self, chunk: TokenChunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += [(logprob, id, None) for logprob, id in zip(chunk.logprobs, chunk.token_ids, strict=True)]
        self.versions += chunk.versions
        self.finish, self.preemptions = chunk.finish, chunk.preemptions

    def due(self) -> bool:
        """Says whether to send an event: for the first token, for `interval` more, or for the end."""
        if self.finish is not None:
            return not self.complete
        return len(self.token_ids) - self.told >= (self.sample.interval if self.told else 1)

    def as_json(self, version: int, decode: Callable[[Sequence[int], bool], str]) -> Json:
        """The reply, or an event, with all tokens so far. Only the last one has text."""
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
        text = decode(self.token_ids, self.sample.skip_special_tokens) if self.complete else ""
        return {"text": text, "output_ids": self.token_ids, "meta_info": meta}


class Call(Response):
    """The reply to a body. If the client leaves or the reply is cancelled, the samples end."""

    def __init__(
        self,
        body: Body,
        version: Callable[[], int],
        decode: Callable[[Sequence[int], bool], str],
        leave: Callable[[Call], None],
    ) -> None:
        super().__init__()
        self.body = body
        self.answers = [SampleAnswer(sample) for sample in body.samples]
        self._version, self._decode, self._leave = version, decode, leave
        self._streams: list[tuple[Incoming, TokenStream]] = []
        self._news = asyncio.Event()

    def submit(self, incoming: Sequence[Incoming], generate: Callable[..., TokenStream]) -> None:
        """Queues all requests in the engine. Raises EngineError for a bad one; `close` ends the rest."""
        for part in incoming:
            self._streams.append((part, generate(part.request)))
            prompt = len(part.request.prompt)
            for index, place in enumerate(part.places):
                answer = self.answers[place]
                answer.engine_id = f"{part.request.rid}/{index}"
                answer.prompt_tokens = prompt + answer.sample.begun

    async def close(self) -> None:
        """Ends the samples that still run. May be called again."""
        self._leave(self)
        streams, self._streams = self._streams, []
        for _, stream in streams:
            await stream.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        collecting = [asyncio.create_task(self._collect(part, stream)) for part, stream in self._streams]
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

    async def _collect(self, part: Incoming, stream: TokenStream) -> None:
        async for chunk in stream:
            self.answers[part.places[chunk.sample]].add(chunk)
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
        return answer.as_json(self._version(), self._decode)


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
