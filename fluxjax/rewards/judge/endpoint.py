"""An HTTP address to which questions are posted, again and again while its server has trouble and time is left."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from rollout.listening import is_loopback

from ...base.errors import ConfigError
from ..answers import Failing, RewardFailure

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

_MOST_BYTES = 1 << 20  # of a reply
_CONNECT_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds between two tries; they double
_LONGEST_SHARED = 60.0  # seconds that a Retry-After holds back other questions
_PASSING = frozenset({408, 425, 429})  # statuses, and all from 500 on, after which the same may succeed


class _Trouble(Exception):
    """A try failed. `passes`: another one may succeed, after `pause` seconds where the server says so."""

    def __init__(self, why: str, *, passes: bool = True, pause: float = 0.0, timed_out: bool = False) -> None:
        super().__init__(why)
        self.passes, self.pause, self.timed_out = passes, pause, timed_out


class Endpoint:
    """One address. Tries after the first are counted as `retries` of `counts`."""

    def __init__(self, url: str, token: str, request_seconds: float, counts: MutableMapping[str, float]) -> None:
        self.url, self._token, self._request_seconds, self._counts = url, token, request_seconds, counts
        self._name = urlsplit(url)._replace(query="").geturl()  # in messages: a query may have a key
        self._not_before = 0.0  # by time.monotonic, as a Retry-After says

    async def post(self, body: Any, deadline: float, read: Callable[[Any], T]) -> T:
        """Returns what `read` makes of the reply to a JSON body; for one that it can't read it raises ValueError,
        LookupError, TypeError or AttributeError. Raises RewardFailure once the server refuses, or there is no time for
        another try before `deadline` (by time.monotonic)."""
        import aiohttp

        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self._token}"} if self._token else {}
        pause, worst = _FIRST_PAUSE, None
        # A session for each question: one that is kept belongs to one event loop, and has to be closed there.
        async with aiohttp.ClientSession(headers=headers, auto_decompress=False) as session:
            while True:
                await self._held_back(deadline)
                try:
                    return read(await self._once(session, data, deadline))
                except _Trouble as error:
                    trouble = error
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    trouble = _Trouble("its reply is not what this route replies")
                if not trouble.passes:
                    raise RewardFailure(Failing.RAISED, f"{self._name}: {trouble}")
                if worst is None or not trouble.timed_out:  # the last one has little time: what was before says more
                    worst = trouble
                wait = max(trouble.pause, pause * random.uniform(0.5, 1.0))  # apart, so that not all come at once
                if time.monotonic() + wait >= deadline:
                    way = Failing.TIMED_OUT if worst.timed_out else Failing.RAISED
                    raise RewardFailure(way, f"{self._name}: {worst}; no time is left for another try")
                self._counts["retries"] += 1
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _held_back(self, deadline: float) -> None:
        """Waits until the server wants to hear anything again."""
        while (wait := self._not_before - time.monotonic()) > 0:
            if self._not_before >= deadline:
                raise RewardFailure(Failing.RAISED, f"{self._name}: it wants no questions (Retry-After) for too long")
            await asyncio.sleep(wait)

    async def _once(self, session: aiohttp.ClientSession, data: bytes, deadline: float) -> Any:
        import aiohttp

        seconds = max(min(self._request_seconds, deadline - time.monotonic()), 1e-3)
        within = aiohttp.ClientTimeout(total=seconds, sock_connect=min(_CONNECT_SECONDS, seconds))
        try:
            # A redirect would take the token to where nobody said that it should go.
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
            raise _Trouble(f"status {status}, a redirect to {where}: give that address", passes=False)
        if status in _PASSING or status >= 500:
            pause = _retry_after(response.headers.get("Retry-After", ""))
            self._not_before = max(self._not_before, time.monotonic() + min(pause, _LONGEST_SHARED))
            raise _Trouble(f"status {status}", pause=pause)
        hint = "; is judge.token_env right?" if status in (401, 403) else ""
        raise _Trouble(f"status {status}: {self._said(raw)}{hint}", passes=False)

    def _said(self, raw: bytes) -> str:
        """Returns what an error reply says, on one line, without the token."""
        text = raw[:2000].decode(errors="replace")
        try:
            said = json.loads(raw)
            said = said.get("error", said)
            text = str(said.get("message", said)) if isinstance(said, dict) else str(said)
        except (ValueError, AttributeError, RecursionError):
            pass
        text = text.replace(self._token, "***") if self._token else text
        return " ".join(text.split())[:150]


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > _MOST_BYTES:
            raise _Trouble(f"its reply has more than {_MOST_BYTES} bytes")
    return bytes(raw)


def _retry_after(text: str) -> float:
    """Returns the seconds of a Retry-After header, which may be a date; 0 where it says nothing."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(seconds, 1e6) if seconds > 0 else 0.0  # NaN is none


def checked_url(url: str, route: str, token: str, plain_http: bool) -> str:
    """Returns the address of a route: `route` is added where the address doesn't end so. Raises ConfigError for what is
    no http address, and for a token that would go over http to another machine without `plain_http`."""
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
    """Returns the token in an environment variable. Raises ConfigError where there is none."""
    if not variable:
        return ""
    token = os.environ.get(variable, "").strip()
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(f"judge.token_env is {variable!r}, but that variable of the environment has no token")
    return token
