"""The common parts of all servers that listen for the trainer: the token, answers to errors, `/health`."""

import hmac
import json
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .engine import EngineError
from .wire import BadRequest, Json

LEFT = 499  # status that is logged for a client that left
MOST = 4 << 30  # most bytes of a request: a bucket of weights may be one large tensor, in base64


def error_json(message: str, status: int) -> Json:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


class AsciiJSON(JSONResponse):
    """JSON in ASCII, which can repeat any text of a client, even half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def error_response(message: str, status: int) -> JSONResponse:
    return AsciiJSON(error_json(message, status), status)


class Guarded:
    """Answers 401 to requests without the token, except GET /health, and closes their connections; 413 to a body of
    more than `most` bytes, without reading the rest; 503 to all requests while the server stops."""

    def __init__(self, app: ASGIApp, token: str, stopping: Callable[[], bool], most: int = MOST) -> None:
        self._app, self._stopping, self._most = app, stopping, most
        self._wanted = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal: Response | None = None
        headers = dict(scope.get("headers", ()))
        given, length = headers.get(b"authorization", b""), headers.get(b"content-length", b"0")
        open_to_all = (scope.get("method"), scope.get("path")) == ("GET", "/health")
        if self._stopping():
            refusal = error_response("the server is shutting down", 503)
        elif self._wanted and not open_to_all and not hmac.compare_digest(given, self._wanted):
            refusal = error_response("Authorization must be Bearer TOKEN, with the token of this server", 401)
            refusal.headers["connection"] = "close"
        elif length.isdigit() and int(length) > self._most:
            refusal = error_response(f"a request has at most {self._most} bytes, not {length.decode()}", 413)
        await (refusal or self._app)(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """Refuses a body without a declared length as soon as it exceeds `most` bytes."""
        came = 0

        async def bounded() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self._most:
                raise HTTPException(413, f"a request has at most {self._most} bytes")
            return message

        return bounded


def health_route(path: str = "/health") -> Route:
    """The route that answers as long as the process runs."""

    async def health(request: Request) -> Response:
        return Response(headers={"connection": "close"})  # clients without the token keep no connection

    return Route(path, health, methods=["GET"])


def error_handlers() -> Any:
    """The function that answers each type of exception, in the form that Starlette takes."""
    return dict.fromkeys((BadRequest, EngineError, HTTPException, ClientDisconnect, Exception), _answer)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=LEFT)
    if isinstance(error, HTTPException):
        return error_response(error.detail, error.status_code)
    if isinstance(error, BadRequest | EngineError):
        return error_response(str(error), 400)
    return error_response(f"{type(error).__name__}: {error}", 500)
