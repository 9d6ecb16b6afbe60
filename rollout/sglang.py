"""The client of one rollout server: SGLang, or `rollout.serve` behind the same routes.

Nothing that a server says is believed unseen: ids, log-probs, versions and counts of every reply are compared with
what was asked and with what came before. A reply that does not fit is a `ServerError`, as is a server out of reach.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import aiohttp

from .engine import EngineError, FinishReason
from .wire import Json

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
CONNECT, CONTROL, UPDATE = 5.0, 30.0, 600.0  # seconds: to connect, for a short order, for new weights
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class ServerError(EngineError):
    """A server is gone, hangs, or answers what makes no sense: others may do better."""


class Refused(EngineError):
    """A server refuses a request (status 4xx): the request is wrong, and would be elsewhere, too."""


@dataclasses.dataclass
class SampleReply:
    """What came of one sample so far. `versions` are known of the first tokens only, until the end."""

    rid: str
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None


class ServerClient:
    """The routes of a server as methods. One event loop; `close` at the end.

    Every method raises ServerError for a server that can't be reached, takes too long (`CONTROL` seconds, `UPDATE` for
    weights) or fails, Refused for what the server refuses. Both name address and route.
    """

    def __init__(self, address: str, *, token: str = "") -> None:
        self.address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # --- orders ---------------------------------------------------------------------------------

    async def abort(self, rid: str) -> None:
        """Ends the sample of this id. Ids match by their beginnings: none may begin as another does."""
        await self._order("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._order("/abort_request", {"abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        """Stops generating. `abort` ends what runs; `retract` gives its cache up, so that it is computed again;
        `in_place` keeps it. What is sent meanwhile waits."""
        await self._order("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._order("/continue_generation", {})

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Reads a checkpoint folder that the server can see, as `version`. To be paused before, and checked behind."""
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": True, "abort_all_requests": False}
        await self._order("/update_weights_from_disk", body, seconds=UPDATE)

    async def checksums(self) -> Mapping[str, str]:
        """One a tensor, as the server has it. Raises ServerError for one that is divided over devices."""
        answer = await self._order("/weights_checker", {"action": "checksum"}, seconds=UPDATE)
        ranks = answer.get("ranks") if isinstance(answer, dict) else None
        if not isinstance(ranks, list) or len(ranks) != 1 or not isinstance(ranks[0].get("checksums"), dict):
            found = len(ranks) if isinstance(ranks, list) else 0
            raise ServerError(f"{self.address}: checksums of one rank are understood, not of {found}")
        return ranks[0]["checksums"]

    async def sleep(self) -> None:
        """Gives memory back. Only where nothing runs: SGLang would die."""
        if load := (await self.load())["running"]:
            raise EngineError(f"{self.address}: can't sleep, {load:g} samples are running; abort them first")
        await self._order("/release_memory_occupation", {})

    async def wake(self) -> None:
        await self._order("/resume_memory_occupation", {})

    # --- questions ------------------------------------------------------------------------------

    async def model_info(self) -> Json:
        return await self._order("/model_info", None)

    async def server_info(self) -> Json:
        return await self._order("/server_info", None)

    async def load(self, seconds: float = CONTROL) -> dict[str, float]:
        """Samples that run and wait, and tokens a second. The scheduler itself answers: one that hangs does not."""
        answer = await self._order("/v1/loads", None, seconds=seconds)
        loads = answer.get("loads") if isinstance(answer, dict) else None
        if not loads:
            raise ServerError(f"{self.address}/v1/loads: says no loads: {str(answer)[:200]}")
        keys = {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "tokens_per_second": "gen_throughput"}
        return {name: float(sum(load.get(key) or 0 for load in loads)) for name, key in keys.items()}

    async def metrics(self) -> str:
        async with self._reach("GET", "/metrics", None, CONTROL) as response:
            return await response.text()

    # --- generation -----------------------------------------------------------------------------

    async def generate(
        self, body: Json, replies: Sequence[SampleReply], vocabulary: int, version: int
    ) -> AsyncGenerator[SampleReply]:
        """Sends a body of `wire.request_body` and fills `replies`, one a sample in its order; yields each that ended.

        `version` is what the server has now. After a ServerError, `replies` hold what came until then: the first
        `len(versions)` tokens of each are certain in every respect.
        """
        reader = _Reader(self.address, replies, vocabulary, version)
        async with self._reach("POST", "/generate", body, None) as response:
            try:
                async for event in _events(response):
                    ended = reader.read(event)
                    if ended is not None:
                        yield ended
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise ServerError(f"{self.address}/generate: broke off: {_said(error)}") from error
        reader.end()

    # --- below ----------------------------------------------------------------------------------

    async def _order(self, route: str, body: Json | None, *, seconds: float = CONTROL) -> Any:
        async with self._reach("GET" if body is None else "POST", route, body, seconds) as response:
            try:
                data = await response.read()
                answer = json.loads(data) if data else None
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                raise ServerError(f"{self.address}{route}: its answer can't be read: {_said(error)}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise Refused(f"{self.address}{route}: {answer.get('message', answer)}")
        return answer

    @contextlib.asynccontextmanager
    async def _reach(
        self, method: str, route: str, body: Json | None, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is not None and self._session.closed:
            raise ServerError(f"{self.address}{route}: its server has come up elsewhere, or the fleet is closed")
        if self._session is None:
            # Each stream is a connection; how many there are is up to whoever asks.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT)
        try:
            async with self._session.request(method, self.address + route, json=body, timeout=timeout) as response:
                if response.status >= 400:
                    text = (await response.text())[:500]
                    kind = Refused if response.status < 500 and response.status != 429 else ServerError
                    raise kind(f"{self.address}{route}: status {response.status}: {text}")
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerError(f"{self.address}{route}: {_said(error)}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """The events of a stream, up to its `[DONE]`. Raises ServerError for one that ends before, or that is not JSON."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not (line := line.strip()):
                continue
            if line == b"data: [DONE]":
                return
            try:
                event = json.loads(line.removeprefix(b"data: "))
                if not isinstance(event, dict):
                    raise ValueError("no object")
            except ValueError as error:
                raise ServerError(f"{response.url}: an event that is not JSON ({error}): {line[:100]!r}") from None
            yield event
    raise ServerError(f"{response.url}: the stream ended without [DONE]")


class _Reader:
    """Enters the events of one stream into the replies of its samples, and refuses what does not fit."""

    def __init__(self, address: str, replies: Sequence[SampleReply], vocabulary: int, version: int) -> None:
        self._address, self._replies, self._vocabulary = address, replies, vocabulary
        self._start = version
        # Events name the version that the server has when it writes them. While that is the one of the start, so are
        # the tokens; after a change, which token is whose is known at the end only.
        self._same = [True] * len(replies)

    def read(self, event: Json) -> SampleReply | None:
        """Returns the sample that ended, if one did."""
        if (error := event.get("error")) is not None:
            said = error if isinstance(error, dict) else {"message": error}
            kind = Refused if said.get("code") in (400, 422) else ServerError
            raise kind(f"{self._address}/generate: {said.get('message', said)}")
        index = event.get("index", 0)
        if not isinstance(index, int) or not 0 <= index < len(self._replies):
            raise self._wrong(f"index {index!r} of {len(self._replies)} samples")
        reply, meta = self._replies[index], event.get("meta_info")
        if not isinstance(meta, dict) or meta.get("id") != reply.rid:
            raise self._wrong(f"an answer to {meta.get('id') if isinstance(meta, dict) else meta!r}, not {reply.rid}")
        if reply.finish is not None:
            raise self._wrong(f"sample {reply.rid} ended twice")
        self._tokens(reply, event.get("output_ids"), meta)
        return self._end_or_not(index, reply, meta)

    def _tokens(self, reply: SampleReply, ids: Any, meta: Json) -> None:
        logprobs, had = meta.get("output_token_logprobs"), len(reply.ids)
        if not isinstance(ids, list) or not isinstance(logprobs, list):
            raise self._wrong(f"no output_ids or no output_token_logprobs for {reply.rid}")
        if not len(ids) == len(logprobs) == meta.get("completion_tokens"):
            raise self._wrong(
                f"{len(ids)} ids, {len(logprobs)} log-probs, {meta.get('completion_tokens')} tokens for {reply.rid}"
            )
        if ids[:had] != reply.ids:
            raise self._wrong(f"tokens of {reply.rid} that were others before")
        for id, entry in zip(ids[had:], logprobs[had:], strict=True):
            if not isinstance(id, int) or not 0 <= id < self._vocabulary:
                raise self._wrong(f"token {id!r} of a vocabulary of {self._vocabulary}")
            value = entry[0] if isinstance(entry, list) and len(entry) > 1 and entry[1] == id else None
            if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
                raise self._wrong(f"a log-prob {entry!r} of token {id}")
            reply.ids.append(id)
            reply.logprobs.append(float(value))

    def _end_or_not(self, index: int, reply: SampleReply, meta: Json) -> SampleReply | None:
        finish = meta.get("finish_reason")
        if finish is None:
            self._same[index] &= meta.get("weight_version") == str(self._start)
            if self._same[index]:
                reply.versions += [self._start] * (len(reply.ids) - len(reply.versions))
            return None
        kind = finish.get("type") if isinstance(finish, dict) else None
        if kind not in _REASONS:
            raise self._wrong(f"a finish reason {finish!r}")
        if kind == "abort" and finish.get("status_code"):  # the server's own trouble, not our order
            raise self._wrong(f"an abort with status {finish['status_code']}: {finish.get('message')}")
        known = len(reply.versions)
        versions = self._versions(meta.get("weight_versions"), len(reply.ids))
        if versions[:known] != reply.versions:
            raise self._wrong(f"versions {versions[:known]} of {reply.rid} that were {reply.versions} before")
        reply.versions = versions
        reply.finish = _REASONS[kind]
        return reply

    def _versions(self, spans: Any, tokens: int) -> list[int]:
        versions: list[int] = []
        try:
            for span in spans or []:
                if span["start"] != len(versions) or span["end"] <= span["start"]:
                    raise ValueError
                versions += [int(span["version"])] * (span["end"] - span["start"])
        except (TypeError, KeyError, ValueError):
            raise self._wrong(f"weight_versions {spans!r}") from None
        if len(versions) != tokens or sorted(versions) != versions:
            raise self._wrong(f"weight_versions {spans!r} for {tokens} tokens")
        return versions

    def end(self) -> None:
        if left := [reply.rid for reply in self._replies if reply.finish is None]:
            raise ServerError(f"{self._address}/generate: the stream ended before {len(left)} samples did")

    def _wrong(self, what: str) -> ServerError:
        return ServerError(f"{self._address}/generate: answers {what}")
