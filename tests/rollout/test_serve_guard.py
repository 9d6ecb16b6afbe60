"""What is turned away before an application reads it."""

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollout.serve_guard import Guarded, error_handlers


class Application:
    def __init__(self, most: int) -> None:
        self.read: list[int] = []
        app = Starlette(routes=[Route("/", self._take, methods=["POST"])], exception_handlers=error_handlers())
        self._guarded = Guarded(app, "secret", lambda: False, most)

    async def _take(self, request: Request) -> Response:
        self.read.append(len(await request.body()))
        return Response()

    def status(self, *pieces: bytes, says_length: bool, token: str = "secret") -> int:
        """Of the answer to a request with this body."""
        headers = [(b"authorization", f"Bearer {token}".encode())]
        headers += [(b"content-length", str(sum(map(len, pieces))).encode())] if says_length else []
        waiting = list(pieces)
        answers: list[Any] = []

        async def receive() -> dict[str, Any]:
            piece = waiting.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

        async def send(message: Any) -> None:
            answers.append(message)

        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
        asyncio.run(self._guarded(scope, receive, send))
        return answers[0]["status"]


@pytest.mark.parametrize("says_length", [False, True])
def test_a_body_is_bounded_before_it_is_read(says_length):
    application = Application(most=10)
    assert application.status(b"12345", b"67890", says_length=says_length) == 200
    assert application.status(b"12345", b"67890", b"1", says_length=says_length) == 413
    assert application.read == [10]


def test_the_token_comes_first():
    application = Application(most=10)
    assert application.status(b"12345678901", says_length=True, token="secre") == 401 and not application.read
