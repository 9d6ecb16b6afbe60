"""The protocol of rollout engines: the embedded engine (`rollout.jax_engine`) and groups of servers (`rollout.fleet`).

A response comes back with exactly the token ids that were sampled. Each token has its log-probability
(`SamplingParams`) and the version of the weights that produced it.
"""

import dataclasses
import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from models.inputs import ModelInput
from sharding.mesh import Device


class FinishReason(enum.Enum):
    STOP = "stop"  # a stop id was sampled; it is the last token of the response
    LENGTH = "length"  # `max_new_tokens` reached
    ABORT = "abort"  # aborted by the caller, or because `need` samples have ended; the tokens so far are kept


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The way to sample tokens. Log-probs are those of `softmax(logits / temperature)`, not renormalised for top-p or
    top-k, as in SGLang. Forbidden ids have logits of minus infinity."""

    max_new_tokens: int = 64
    temperature: float = 1.0  # 0 is greedy, with log-probs of temperature 1
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    stop_ids: tuple[int, ...] = ()
    forbidden_ids: tuple[int, ...] = ()  # never sampled: media placeholders must not be generated


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """A request for `n` responses to one prompt. Sample `i` has the response id `f"{rid}/{i}"`.

    The random numbers of token `t` of sample `i` depend on `(seed, i, t)` only, never on other requests. `prefix_ids`
    are the tokens of responses begun earlier (partial rollouts, migration), which are not returned again. `t` counts
    from the beginning of the prefix, and `max_new_tokens` bounds prefix and new tokens together. `samples` are the
    numbers `i`: a request that repeats numbers and seed gets the same tokens. Once `need` samples have ended, the
    embedded engine aborts the other samples by itself; other engines wait for `Engine.abort`.

    `session` names the conversation of a group: the prompt is the conversation so far. The engine may keep the keys and
    values of a sample that has ended. The sample's next turn is then a request with the same session and the same
    number in `samples`. If the prompt of the next turn begins with the kept tokens, only the other tokens are computed.
    """

    rid: str
    prompt: ModelInput
    sampling: SamplingParams
    n: int = 1
    seed: int = 0
    prefix_ids: tuple[tuple[int, ...], ...] = ()  # empty, or one tuple for each sample
    samples: tuple[int, ...] = ()  # empty: 0 .. n - 1; else `n` different numbers, none negative
    need: int = 0  # samples that the caller waits for; 0: all
    session: str = ""  # empty: nothing is kept

    @property
    def numbers(self) -> Sequence[int]:
        return self.samples or range(self.n)


@dataclasses.dataclass(frozen=True)
class TokenChunk:
    """Newly generated tokens of one sample, as tuples of equal length; the last chunk also has a `finish`."""

    rid: str
    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: FinishReason | None = None
    preemptions: int = 0  # preemptions of the sample so far: see `EngineStats`


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot for routing and display. Tokens and preemptions are counted from the start of the engine."""

    version: int
    running: int  # samples that hold a slot
    waiting: int  # samples queued
    slots: int
    tokens_generated: int
    tokens_prefilled: int
    preemptions: int = 0  # times that a running sample lost its pages because the cache had no room for all samples


class EngineError(RuntimeError):
    """The engine can't serve: a request does not fit, a server is dead, or weights have another shape."""


class WeightsMismatch(RuntimeError):
    """A server does not hold the weights that were sent to it, and must not generate."""


@runtime_checkable
class Engine(Protocol):
    """An inference engine. All methods are called from one asyncio loop and never block it."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Queue the request and stream its chunks until every sample has finished."""
        ...

    async def abort(self, rid: str) -> None:
        """End a request (`rid`) or one sample of it (`rid/i`); its stream closes with `FinishReason.ABORT` chunks.
        Unknown and finished ids are ignored, since a sample may finish while its abort is on the way."""

    async def end_session(self, session: str) -> None:
        """Frees what is kept of a session (empty: of all sessions); unknown sessions are ignored. Nothing but speed
        depends on what is kept, and other events may free it before."""

    async def update_weights(self, version: int, params: Mapping[str, Any]) -> None:
        """Serve `params` as `version` from the next token on. Running samples go on under the new weights. An engine
        may keep device arrays of `params` until the next update, so the caller must not donate them before."""

    async def set_parallelism(self, devices: Sequence[Device]) -> None:
        """Compute on these devices together from now on (tensor parallelism): 1, 2, 4, ... devices of one host. Raises
        `EngineError` while samples are running or waiting, for devices that the engine can't use, and if the engine
        can't change its devices."""

    async def pause(self) -> None:
        """Stop generating after the tokens that are being computed; running samples continue at `resume`."""

    async def resume(self) -> None: ...

    async def sleep(self, *, weights: bool = False) -> None:
        """Free the memory of the cache and, with `weights`, also that of the weights until the next update. A group of
        servers always frees both. Raises `EngineError` while samples are running."""

    async def wake(self) -> None: ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
