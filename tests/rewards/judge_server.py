"""A judge that answers as OpenAI does, or goes wrong as the response that it is shown says; also as a process."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

from rollout.listening import address_of, bound_socket, http_server, serve_until_told

_RESPONSE = re.compile(r"<response-(\w+)>\n(.*)\n</response-\1>", re.DOTALL)


class FakeJudge:
    """An ASGI application. `bodies` are the requests that it got, `headers` theirs, `times` when they came."""

    def __init__(self) -> None:
        self.address = ""
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self._asked: collections.Counter[str] = collections.Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw = b""
        while (message := await receive())["type"] == "http.request":
            raw += message["body"]
            if not message.get("more_body"):
                break
        body = json.loads(raw)
        self.bodies.append(body)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.times.append(time.monotonic())
        content = body["messages"][0]["content"]
        question = content if isinstance(content, str) else content[-1]["text"]
        found = _RESPONSE.search(question)
        assert found is not None, question
        nonce, response = found.groups()
        self._asked[response] += 1
        behaviour, _, argument = response.partition(" ")
        method = getattr(self, f"_{behaviour}", None)
        if method is None:
            await self._says(send, f"So be it.\nVERDICT {nonce}: {int(response == 'right')}")
        else:
            await method(receive, send, nonce, argument, self._asked[response])

    async def _says(self, send: Any, text: str | None, finish: str = "stop") -> None:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        await self._reply(send, 200, json.dumps({"object": "chat.completion", "choices": [choice]}).encode())

    async def _reply(self, send: Any, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        lengths = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
        await send({"type": "http.response.start", "status": status, "headers": lengths})
        await send({"type": "http.response.body", "body": body})

    # --- what a response can ask for ------------------------------------------------------------

    async def _verdict(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        await self._says(send, argument.replace("NONCE", nonce))

    async def _unsure(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        """No verdict the first so many times."""
        await self._says(send, "Hard to say." if time <= int(argument) else f"VERDICT {nonce}: 1")

    async def _alternates(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        await self._says(send, f"VERDICT {nonce}: {time % 2}")

    async def _cut(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        await self._says(send, f"VERDICT {nonce}: 1", "length")

    async def _refuses(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        await self._says(send, None)

    async def _status(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        """A status, and how many times, and a Retry-After."""
        status, times, *after = argument.split(" ", 2)
        if time > int(times):
            return await self._says(send, f"VERDICT {nonce}: 1")
        error = {"error": {"message": f"no, Bearer {self.headers[-1].get('authorization', '')[7:]}"}}
        headers = [(b"location", b"http://elsewhere.invalid/")] if status == "307" else []
        for value in after:
            moment = formatdate(float(value[5:]), usegmt=True) if value.startswith("date:") else value
            headers.append((b"retry-after", moment.encode()))
        await self._reply(send, int(status), json.dumps(error).encode(), *headers)

    async def _hangs(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        """The first so many times, until the other side goes."""
        if time > int(argument):
            return await self._says(send, f"VERDICT {nonce}: 1")
        await _gone(receive)

    async def _stalls(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        """In the middle of its body."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})
        await _gone(receive)

    async def _slow(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        await asyncio.sleep(float(argument))
        await self._says(send, f"VERDICT {nonce}: 1")

    async def _breaks(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        """Closes the connection within the body."""
        if time > int(argument):
            return await self._says(send, f"VERDICT {nonce}: 1")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise ConnectionError("as it was asked to")

    async def _garbage(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        bodies = [b"<html>", b"{}", b'{"choices": []}', b"[" * 100_000, b"\xff\xfe", b"null", b""]
        bodies += [b'{"choices": [{"message": {"content": 3}}]}', b'{"choices": [{"message": null}]}', b"NaN"]
        if time > len(bodies):
            return await self._says(send, f"VERDICT {nonce}: 1")
        await self._reply(send, 200, bodies[time - 1])

    async def _huge(self, receive: Any, send: Any, nonce: str, argument: str, time: int) -> None:
        """Without end."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(_gone(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def judge_in_thread() -> Iterator[FakeJudge]:
    judge, listening, ready = FakeJudge(), bound_socket("127.0.0.1", 0), threading.Event()
    server = http_server(judge, ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    assert ready.wait(60)
    judge.address = address_of(listening)
    try:
        yield judge
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


async def _nothing() -> None: ...


if __name__ == "__main__":
    asyncio.run(serve_until_told(FakeJudge(), bound_socket("127.0.0.1", int(sys.argv[1])), _nothing))
