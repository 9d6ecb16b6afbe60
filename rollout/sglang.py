"""The client of one rollout server: SGLang, or `rollout.serve` behind the same routes.

The client checks every reply: it compares ids, log-probs, versions and counts with the request and with earlier
events. A reply that does not fit raises `ServerError`, and so does a server out of reach.
"""

import asyncio
import contextlib
import dataclasses
import io
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import aiohttp

from .engine import EngineError, FinishReason
from .wire import SERVE_VERSION, Json

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
CONNECT, CONTROL, UPDATE = 5.0, 30.0, 600.0  # seconds: to connect, for a short order, for new weights
OPENING = 16  # limit of requests whose head is not sent yet: our servers hang up on the oldest of 64 silent connections
LEAST_LOGPROB = -1e30  # least log-prob of a token that can be sampled
_ROWS_DROPPED = "drops the height and width rows of Qwen3.5's M-RoPE on CUDA (slime #2336, sglang #35345)"
# By `model_type`: the first release of SGLang that computes the model rightly, and the fault of earlier releases
FIRST_RELEASES = {"qwen3_5": ((0, 5, 20), _ROWS_DROPPED), "qwen3_5_moe": ((0, 5, 20), _ROWS_DROPPED)}
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class ServerError(EngineError):
    """A server is gone, hangs, or gives a wrong answer, but another server may do better."""


class Refused(EngineError):
    """A server refuses a request (status 4xx): the request is wrong, so that any server would refuse it."""


class UnfitRelease(Refused):
    """A server's release of SGLang computes the model of the run wrongly."""


@dataclasses.dataclass
class SampleReply:
    """The reply for one sample so far. Until the end, `versions` may lack the versions of the last tokens."""

    rid: str
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    preemptions: int = 0  # times that the sample lost its cache to other samples, if the server counts them


class ServerClient:
    """The routes of a server as methods, for one event loop. Call `close` at the end. A request raises ServerError if
    the server can't be reached, fails or takes too long (`CONTROL` seconds, or `UPDATE` for weights and `ask`), Refused
    if the server refuses it. Both errors name address and route."""

    def __init__(self, address: str, *, token: str = "") -> None:
        self.address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._opening = asyncio.Semaphore(OPENING)
        self._closed = False

    async def close(self) -> None:
        """Ends all requests; later calls raise ServerError."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    # --- orders ---------------------------------------------------------------------------------

    async def abort(self, rid: str) -> None:
        """Ends all samples whose ids begin with `rid`. No id should therefore be the beginning of another id."""
        await self._order("/abort_request", {"rid": rid})

    async def end_session(self, session: str) -> None:
        """Frees what `rollout.serve` keeps of a session. SGLang, whose cache drops old prefixes itself, refuses."""
        await self._order("/end_session", {"session_id": session})

    async def pause(self, mode: PauseMode) -> None:
        """Stops generating: `abort` ends running samples, `retract` drops their cache, `in_place` keeps it."""
        await self._order("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._order("/continue_generation", {})

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Has the server read a checkpoint folder, as `version`. Pause the server before, check the weights after."""
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": True, "abort_all_requests": False}
        await self._order("/update_weights_from_disk", body, seconds=UPDATE)

    async def begin_weight_update(self) -> None:
        """Opens an update by `update_from_tensors`; pause the server before. After an unfinished update the server must
        not generate, since parts of its weights may have changed."""
        await self._order("/begin_weight_update", {"selector": "all"}, seconds=UPDATE)

    async def update_from_tensors(
        self, buckets: Sequence[str], version: int | None, form: str = "flattened_bucket"
    ) -> None:
        """Sends each rank one of `buckets`, in base64: a `flattened_bucket` (`weights.torch_buckets`) or, to
        `rollout.serve`, `safetensors`. Only the last call has a version; it drops cached prompts."""
        body: Json = {"serialized_named_tensors": list(buckets), "load_format": form, "abort_all_requests": False}
        body |= {"flush_cache": False} if version is None else {"flush_cache": True, "weight_version": str(version)}
        encoded = await asyncio.to_thread(_encoded, body)
        await self._order("/update_weights_from_tensor", encoded, seconds=UPDATE)

    async def end_weight_update(self) -> None:
        await self._order("/end_weight_update", {}, seconds=UPDATE)

    async def pull_weights(self, local: str, source: str, version: int) -> str:
        """Has the host make a checkpoint folder of a version (`weights.version_folders`); returns the folder."""
        body = {"local_checkpoint_dir": local, "source_dir": source, "target_version": version}
        answer = await self._order("/pull_weights", body, seconds=UPDATE)
        return str(answer.get("model_path", local)) if isinstance(answer, dict) else local

    async def checksums(self) -> list[Mapping[str, str]]:
        """The checksums of the tensors that each tensor-parallel rank of the server holds, in order."""
        answer = await self._order("/weights_checker", {"action": "checksum"}, seconds=UPDATE)
        try:
            ranks = sorted(answer["ranks"], key=_tensor_parallel_rank)
            if not ranks:
                raise ValueError("no ranks")
            return [{name: str(checksum) for name, checksum in rank["checksums"].items()} for rank in ranks]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise ServerError(f"{self.address}/weights_checker: answers {str(answer)[:200]}") from None

    async def sleep(self) -> None:
        """Frees the memory of weights (lost) and cache. Raises EngineError if samples run: SGLang would die."""
        load = await self.load()
        if samples := load["running"] + load["waiting"]:
            raise EngineError(f"{self.address}: can't sleep, {samples:g} samples are running; abort them first")
        await self._order("/release_memory_occupation", {})

    async def wake(self) -> None:
        """Wakes a sleeping server; an awake SGLang would die. Weights are arbitrary until an update."""
        await self._order("/resume_memory_occupation", {})

    # --- questions ------------------------------------------------------------------------------

    async def weight_version(self, seconds: float = CONTROL) -> str:
        """The version that the server states for its weights."""
        return str((await self._info("/model_info", seconds)).get("weight_version"))

    async def ranks(self) -> int:
        """The number of processes that divide the model between them."""
        size = (await self._info("/server_info")).get("tp_size")
        if type(size) is not int or size < 1:
            raise ServerError(f"{self.address}/server_info: tp_size is {size!r}, not a positive number")
        return size

    async def check_release(self, model_type: str) -> None:
        """Raises UnfitRelease for a release of SGLang that computes models of this `model_type` wrongly. An SGLang that
        states no release counts as the oldest."""
        if model_type not in FIRST_RELEASES:
            return
        first, fault = FIRST_RELEASES[model_type]
        version = str((await self._info("/server_info")).get("version"))
        release = re.match(r"\d+(\.\d+)*", version)
        if version != SERVE_VERSION and (release is None or tuple(map(int, release[0].split("."))) < first):
            needed = ".".join(map(str, first))
            raise UnfitRelease(
                f"{self.address}/server_info: the version is {version}; SGLang before {needed} {fault}: "
                f"start SGLang {needed} or later"
            )

    async def asleep(self) -> bool:
        """Says whether the server gave its memory back, by any client's order; always False for SGLang."""
        return (await self._info("/server_info")).get("asleep") is True

    async def _info(self, route: str, seconds: float = CONTROL) -> Json:
        answer = await self._order(route, None, seconds=seconds)
        return answer if isinstance(answer, dict) else {}

    async def load(self, seconds: float = CONTROL) -> dict[str, float]:
        """The numbers of running and waiting samples, and tokens per second, as the server's scheduler reports them."""
        answer = await self._order("/v1/loads", None, seconds=seconds)
        keys = {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "tokens_per_second": "gen_throughput"}
        try:
            first, *further = answer["loads"]
            return {name: float(sum(load.get(key) or 0 for load in (first, *further))) for name, key in keys.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ServerError(f"{self.address}/v1/loads: the answer has no loads: {str(answer)[:200]}") from None

    async def ask(self, route: str, body: Json | None = None) -> Any:
        """The answer of a route; a server without this route refuses the request. `body` is sent as JSON."""
        return await self._order(route, body, seconds=UPDATE)

    # --- generation -----------------------------------------------------------------------------

    async def generate(
        self,
        body: Json,
        replies: Sequence[SampleReply],
        vocabulary: int,
        version: int,
        accepted: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[SampleReply]:
        """Sends a body of `wire.request_body` to a server that has `version`, and fills `replies`, one for each sample
        in order; yields each reply when it ends. When the server begins its answer, empties the body, which may have
        many pixels, and calls `accepted`. After a ServerError, the first `len(versions)` tokens of each reply, and
        their versions, are final."""
        reader = _StreamReader(self.address, replies, body["sampling_params"], vocabulary, version)
        async with self._reach("POST", "/generate", body, None) as response:
            body.clear()
            accepted()
            try:
                async for event in _events(response):
                    ended = reader.read(event)
                    if ended is not None:
                        yield ended
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise ServerError(f"{self.address}/generate: broke off: {_said(error)}") from error
        reader.end()

    # --- connections ----------------------------------------------------------------------------

    async def _order(self, route: str, body: Json | bytes | None, *, seconds: float = CONTROL) -> Any:
        async with self._reach("GET" if body is None else "POST", route, body, seconds) as response:
            try:
                data = await response.read()
                answer = json.loads(data) if data else None
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
                raise ServerError(f"{self.address}{route}: its answer can't be read: {_said(error)}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise Refused(f"{self.address}{route}: {answer.get('message', answer)}")
        return answer

    @contextlib.asynccontextmanager
    async def _reach(
        self, method: str, route: str, body: Json | bytes | None, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._closed:
            raise ServerError(f"{self.address}{route}: its connections were closed")
        if self._session is None:
            # Each request has a connection of its own: a server may close a reused connection just when an order goes
            # out on it, and nobody would know whether the order arrived. The number of connections has no bound.
            connector, heads = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.TraceConfig()
            heads.on_request_headers_sent.append(_head_is_sent)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trace_configs=[heads])
        timeout, opening = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT), contextlib.ExitStack()
        if seconds is None:  # `generate`; orders, which have a time-out, do not wait here
            await self._opening.acquire()
            opening.callback(self._opening.release)
        try:
            data = None if body is None else io.BytesIO(body if isinstance(body, bytes) else _encoded(body))
            headers = {"Content-Type": "application/json"}
            async with self._session.request(
                method, self.address + route, data=data, headers=headers, timeout=timeout, trace_request_ctx=opening
            ) as response:
                del data
                if response.status >= 400:
                    text = (await response.text(errors="replace"))[:500]
                    kind = Refused if response.status < 500 and response.status != 429 else ServerError
                    hint = "; FLUXJAX_TOKEN must be the server's" if response.status in (401, 403) else ""
                    raise kind(f"{self.address}{route}: status {response.status}: {text}{hint}")
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerError(f"{self.address}{route}: {_said(error)}") from error
        finally:
            opening.close()


async def _head_is_sent(session: object, request: Any, sent: object) -> None:
    request.trace_request_ctx.close()


def _encoded(body: Json) -> bytes:
    return json.dumps(body).encode()


def _tensor_parallel_rank(rank: Json) -> int:
    places = rank.get("parallelism_info") or [{}]
    return int(places[0].get("tp_rank", 0))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """Yields a stream's events up to `[DONE]`. Raises ServerError if `[DONE]` is missing or an event is not JSON."""
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
                    raise ValueError("not an object")
            except (ValueError, RecursionError) as error:
                raise ServerError(f"{response.url}: an event that is not JSON ({error}): {line[:100]!r}") from None
            yield event
    raise ServerError(f"{response.url}: the stream ended without [DONE]")


class _StreamReader:
    """Enters the events of one stream into the replies of its samples, and refuses events that do not fit."""

    def __init__(
        self, address: str, replies: Sequence[SampleReply], sampling: Sequence[Json], vocabulary: int, version: int
    ) -> None:
        self._address, self._replies, self._vocabulary = address, replies, vocabulary
        self._start = version
        self._stop_ids = frozenset(sampling[0]["stop_token_ids"])  # the same for all samples, like `_forbidden`
        self._forbidden = frozenset(map(int, sampling[0]["logit_bias"] or ()))
        self._most = [params["max_new_tokens"] for params in sampling]
        # An event names the version that the server has when it writes the event. While events name the version of the
        # start, all tokens have this version; after a change, only the last event gives the version of each token.
        self._same = [True] * len(replies)

    def read(self, event: Json) -> SampleReply | None:
        if (error := event.get("error")) is not None:
            said = error if isinstance(error, dict) else {"message": error}
            message = str(said.get("message", said))
            # If the server has dropped patches, the next attempt sends the patches again.
            kind = Refused if said.get("code") in (400, 422) and "not here any more" not in message else ServerError
            raise kind(f"{self._address}/generate: {message}")
        index = event.get("index", 0)
        if type(index) is not int or not 0 <= index < len(self._replies):
            raise self._wrong(f"index {index!r}, but the request has {len(self._replies)} samples")
        reply, meta = self._replies[index], event.get("meta_info")
        if not isinstance(meta, dict) or meta.get("id") != reply.rid:
            raise self._wrong(f"for {meta.get('id') if isinstance(meta, dict) else meta!r}, not for {reply.rid}")
        if reply.finish is not None:
            raise self._wrong(f"a second end of sample {reply.rid}")
        self._tokens(reply, event.get("output_ids"), meta, self._most[index])
        return self._end_or_not(index, reply, meta)

    def _tokens(self, reply: SampleReply, ids: Any, meta: Json, most: int) -> None:
        logprobs, had = meta.get("output_token_logprobs"), len(reply.ids)
        if not isinstance(ids, list) or not isinstance(logprobs, list):
            raise self._wrong(f"no output_ids or no output_token_logprobs for {reply.rid}")
        if not len(ids) == len(logprobs) == meta.get("completion_tokens"):
            raise self._wrong(
                f"{len(ids)} ids, {len(logprobs)} log-probs and {meta.get('completion_tokens')} completion_tokens for "
                f"{reply.rid}; the three must be equal"
            )
        if ids[:had] != reply.ids:
            raise self._wrong(f"other first tokens for {reply.rid} than before")
        if len(ids) > most:
            raise self._wrong(f"{len(ids)} tokens for {reply.rid}, which may have at most {most}")
        for id, entry in zip(ids[had:], logprobs[had:], strict=True):
            if type(id) is not int or not 0 <= id < self._vocabulary:
                raise self._wrong(f"token {id!r}, which is not in the vocabulary of {self._vocabulary}")
            if id in self._forbidden:
                raise self._wrong(f"token {id}, which was forbidden")
            if reply.ids and reply.ids[-1] in self._stop_ids:
                raise self._wrong(f"token {id} behind the stop token {reply.ids[-1]}")
            value = entry[0] if isinstance(entry, list) and len(entry) > 1 and entry[1] == id else None
            if not isinstance(value, int | float) or not LEAST_LOGPROB < value <= 1e-3:  # refuses NaN, too
                raise self._wrong(f"an impossible log-prob {entry!r} for token {id}"[:200])
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
            raise self._wrong(f"an unknown finish reason {finish!r}")
        if kind == "abort" and finish.get("status_code"):  # a fault of the server, not our `abort`
            raise self._wrong(f"an abort with status {finish['status_code']}: {finish.get('message')}")
        if kind == "stop" and not self._stopped(reply):
            raise self._wrong(
                f"an end at token {reply.ids[-1] if reply.ids else None}, which is not among the request's stop_ids "
                f"{sorted(self._stop_ids)} (perhaps among those of the checkpoint's generation_config.json)"
            )
        if kind == "length" and len(reply.ids) != self._most[index]:
            raise self._wrong(f"an end by length at {len(reply.ids)} tokens for {reply.rid}, not {self._most[index]}")
        known = len(reply.versions)
        versions = self._versions(meta.get("weight_versions"), len(reply.ids))
        if versions[:known] != reply.versions:
            raise self._wrong(
                f"versions {versions[:known]} for the first tokens of {reply.rid}, which were {reply.versions} before"
            )
        reply.versions = versions
        retractions = meta.get("num_retractions")
        reply.preemptions = retractions if type(retractions) is int else 0
        reply.finish = FinishReason.STOP if kind == "length" and self._stopped(reply) else _REASONS[kind]
        return reply

    def _stopped(self, reply: SampleReply) -> bool:
        return bool(reply.ids) and reply.ids[-1] in self._stop_ids

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
            raise self._wrong(f"weight_versions {spans!r}, which do not cover {tokens} tokens with growing versions")
        return versions

    def end(self) -> None:
        if left := [reply.rid for reply in self._replies if reply.finish is None]:
            raise ServerError(f"{self._address}/generate: the stream ended before {len(left)} samples did")

    def _wrong(self, what: str) -> ServerError:
        return ServerError(f"{self._address}/generate: answers {what}")
