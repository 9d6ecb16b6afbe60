"""Judges behind HTTP, by OpenAI's chat completions (which SGLang and vLLM serve, too) or SGLang's native `/generate`.

A question is posted again while the server has trouble and the deadline leaves time.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import email.utils
import json
import mimetypes
import os
import pathlib
import random
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import models.processing
from rollout.listening import is_loopback

from ...base.errors import ConfigError
from ...base.medium import Media, MediaKind
from ...config.bounds import as_config_error
from ..named import Failing, RewardFailure
from .questions import Answer, Question

if TYPE_CHECKING:
    import aiohttp

_MOST_BYTES = 1 << 20  # bytes of a reply, at most
_CONNECT_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds between two tries; the pause doubles from the first to the longest
_LONGEST_SHARED = 60.0  # seconds for which a Retry-After holds back other questions, at most
_PASSING = frozenset({408, 425, 429})  # statuses below 500 after which another try may succeed
_MOST_IMAGE_BYTES = 20 << 20  # bytes of an image file, at most; OpenAI takes no larger files
_BEGINNINGS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


class ChatForm:
    """Requests and replies of OpenAI's `/v1/chat/completions`. `extra` has fields of the body, in JSON (null: none)."""

    route = "/v1/chat/completions"

    def __init__(self, model: str, extra: str = "") -> None:
        self._model = model
        try:
            self._extra = json.loads(extra or "{}")
        except ValueError as error:
            raise ConfigError(f"judge.extra is {extra!r}, which is no JSON: {error}") from None
        if not isinstance(self._extra, dict):
            raise ConfigError(f"judge.extra is {extra!r}; it must be a JSON object, of fields of the request")

    def body(self, question: Question) -> dict[str, Any]:
        images = [{"type": "image_url", "image_url": {"url": image}} for image in question.images]
        content = [*images, {"type": "text", "text": question.text}] if images else question.text
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
            "seed": question.seed,
        } | self._extra
        return {name: value for name, value in body.items() if value is not None}

    def answer(self, reply: Any) -> Answer:
        choice = reply["choices"][0]
        content = choice["message"].get("content")
        if content is not None and not isinstance(content, str):
            raise TypeError("content is no text")
        return Answer(content or "", choice.get("finish_reason") != "length")  # no content: only thoughts


class GenerateForm:
    """Requests and replies of `/generate` (SGLang, `rollout.serve`). `processor` is that of the server's checkpoint."""

    route = "/generate"

    def __init__(self, processor: models.processing.Processor) -> None:
        self._processor = processor

    def body(self, question: Question) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": question.max_tokens,
            "temperature": question.temperature,
            "sampling_seed": question.seed,
            "stop_token_ids": list(self._processor.eos_ids),
        }
        return {"input_ids": question_ids(self._processor, question), "sampling_params": sampling}

    def answer(self, reply: Any) -> Answer:
        finish = reply["meta_info"]["finish_reason"]["type"]
        if finish not in ("stop", "length"):
            raise ValueError(f"the answer ended by {finish}")
        return Answer(self._processor.decode([int(id) for id in reply["output_ids"]]), finish == "stop")


def load_processor(folder: str) -> models.processing.Processor:
    """Returns the processor of a checkpoint folder. Raises ConfigError."""
    if not folder:
        raise ConfigError("judge.tokenizer must be the folder of the judge's checkpoint if judge.api is 'generate'")
    with as_config_error("judge.tokenizer", OSError, ValueError):
        return models.processing.Processor.load(folder)


def question_ids(processor: models.processing.Processor, question: Question) -> list[int]:
    """Returns the tokens of a question in the checkpoint's chat template. Texts of special tokens are broken up,
    because a response could end the user's message with them. Raises PromptError."""
    text = question.text
    for token in processor.tokenizer.get_added_tokens_decoder().values():
        if token.special:
            text = text.replace(token.content, f"{token.content[0]} {token.content[1:]}")
    return list(processor.tokenise_chat(text))


def image_url(media: Media) -> str:
    """Returns a URL for an image. Raises RewardFailure for a video, for an image inside a parquet file, and for a file
    that can't be read or has more than 20 MiB."""
    if media.kind is not MediaKind.IMAGE or media.cell:
        what = "a video" if media.kind is not MediaKind.IMAGE else "inside a parquet file"
        raise RewardFailure(Failing.RAISED, f"judge.images shows only images that are files, but one medium is {what}")
    if media.data is None and media.path.startswith(("http://", "https://", "data:")):
        return media.path
    try:
        raw = media.data
        if raw is None:
            with pathlib.Path(media.path).open("rb") as file:
                raw = file.read(_MOST_IMAGE_BYTES + 1)
    except OSError as error:
        raise RewardFailure(Failing.RAISED, f"judge.images: {media.name}: {error.strerror or error}") from None
    if len(raw) > _MOST_IMAGE_BYTES:
        raise RewardFailure(Failing.RAISED, f"judge.images: {media.name} has more than {_MOST_IMAGE_BYTES} bytes")
    known = (kind for beginning, kind in _BEGINNINGS.items() if raw.startswith(beginning))
    kind = next(known, None) or mimetypes.guess_type(media.path)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


class _Trouble(Exception):
    """A try failed, and a later try may succeed. `pause` are the seconds that the server asks to wait."""

    def __init__(self, why: str, *, pause: float = 0.0, timed_out: bool = False) -> None:
        super().__init__(why)
        self.pause, self.timed_out = pause, timed_out


@dataclasses.dataclass(eq=False)
class JudgeServer:
    """A judge at an address. `counts["retries"]` counts the tries after the first try of a question."""

    url: str
    token: str = dataclasses.field(repr=False)
    form: ChatForm | GenerateForm  # its `answer` raises ValueError, LookupError or TypeError for a wrong reply
    request_seconds: float
    counts: MutableMapping[str, float]

    def __post_init__(self) -> None:
        self._name = urlsplit(self.url)._replace(query="").geturl()  # no query, which may hold a key
        self._not_before = 0.0  # the end of a Retry-After, by `time.monotonic`

    async def ask(self, question: Question) -> Answer:
        """Returns the answer. Raises RewardFailure if the server refuses, or if no time for another try is left."""
        import aiohttp

        deadline, data = question.deadline, json.dumps(self.form.body(question)).encode()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        pause, worst = _FIRST_PAUSE, None
        # Each question has its own session, because a shared session would belong to one event loop.
        async with aiohttp.ClientSession(headers=headers, auto_decompress=False) as session:
            while True:
                await self._held_back(deadline)
                try:
                    return self.form.answer(await self._once(session, data, deadline))
                except _Trouble as error:
                    trouble = error
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    trouble = _Trouble("its reply does not have the form of this route")
                if worst is None or not trouble.timed_out:  # a time-out says less than another error
                    worst = trouble
                wait = max(trouble.pause, pause * random.uniform(0.5, 1.0))  # random, so that retries spread
                if time.monotonic() + wait >= deadline:
                    way = Failing.TIMED_OUT if worst.timed_out else Failing.RAISED
                    raise RewardFailure(way, f"{self._name}: {worst}; no time is left for another try")
                self.counts["retries"] += 1
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _held_back(self, deadline: float) -> None:
        while (wait := self._not_before - time.monotonic()) > 0:
            if self._not_before >= deadline:
                raise self._final("it asks for a pause (Retry-After) that is too long")
            await asyncio.sleep(wait)

    async def _once(self, session: aiohttp.ClientSession, data: bytes, deadline: float) -> Any:
        import aiohttp

        seconds = max(min(self.request_seconds, deadline - time.monotonic()), 1e-3)
        within = aiohttp.ClientTimeout(total=seconds, sock_connect=min(_CONNECT_SECONDS, seconds))
        try:
            # A redirect would send the token to an address that nobody configured.
            async with session.post(self.url, data=data, timeout=within, allow_redirects=False) as response:
                raw = await _bounded(response)
        except TimeoutError:
            raise _Trouble("no reply in time", timed_out=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Trouble(f"{type(error).__name__}: {error}"[:200]) from None
        status = response.status
        if status == 200:
            return json.loads(raw)
        if 300 <= status < 400:
            where = response.headers.get("Location", "nowhere")[:200]
            raise self._final(f"status {status}, a redirect to {where}: give that address")
        if status in _PASSING or status >= 500:
            pause = _retry_after(response.headers.get("Retry-After", ""))
            self._not_before = max(self._not_before, time.monotonic() + min(pause, _LONGEST_SHARED))
            raise _Trouble(f"status {status}", pause=pause)
        hint = "; is judge.token_env right?" if status in (401, 403) else ""
        raise self._final(f"status {status}: {self._said(raw)}{hint}")

    def _final(self, why: str) -> RewardFailure:
        return RewardFailure(Failing.RAISED, f"{self._name}: {why}")

    def _said(self, raw: bytes) -> str:
        text = raw[:2000].decode(errors="replace")
        try:
            said = json.loads(raw)
            said = said.get("error", said)
            text = str(said.get("message", said)) if isinstance(said, dict) else str(said)
        except (ValueError, AttributeError, RecursionError):
            pass
        text = text.replace(self.token, "***") if self.token else text
        return " ".join(text.split())[:150]


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > _MOST_BYTES:
            raise _Trouble(f"its reply has more than {_MOST_BYTES} bytes")
    return bytes(raw)


def _retry_after(text: str) -> float:
    """Returns the seconds of a Retry-After header, which may be a date, or 0 if the header cannot be read."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(seconds, 1e6) if seconds > 0 else 0.0  # 0 for NaN, too


def checked_url(url: str, route: str, token: str, plain_http: bool) -> str:
    """Returns the address of `route`, which is added to `url` if missing. Raises ConfigError if `url` is no http
    address or has credentials or, without `plain_http`, if `token` would go over http to another machine."""
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"judge.server is {url!r}; it must be an address such as http://127.0.0.1:30000")
    if parts.username or parts.password:
        raise ConfigError("judge.server has credentials in it; name the variable that has the token in judge.token_env")
    if token and parts.scheme == "http" and not is_loopback(parts.hostname or "") and not plain_http:
        raise ConfigError(
            f"judge.server is {url!r}: the token of judge.token_env would be sent to another machine for all to read; "
            "use https, or set judge.plain_http=True where the network is trusted"
        )
    path = parts.path.rstrip("/")
    if not path.endswith(route.rpartition("/v1")[2]):
        path = path.removesuffix("/v1") + route
    return parts._replace(path=path).geturl()


def token_of(variable: str) -> str:
    """Returns the token in an environment `variable`, "" without one. Raises ConfigError for an unusable token."""
    if not variable:
        return ""
    token = os.environ.get(variable, "").strip()
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(f"judge.token_env is {variable!r}, but that variable of the environment has no token")
    return token
