"""The two ends of a request: the check before the scheduler accepts it, and the stream that its consumer reads.

A request is checked completely before it is accepted, so that a refusal leaves no trace. `checked` returns the request
in plain types (Python's numbers, tuples, int32 and float32 arrays), which later code need not check.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import reprlib
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import DecoderConfig, VisionConfig
from models.inputs import ModelInput, VisionInput
from models.shadow import ShadowTensor

from .engine import EngineError, FinishReason, GenerateRequest, SamplingParams, TokenChunk
from .slots import PAGE_TOKENS, pages_for

LEAST, MOST = int(np.iinfo(np.int32).min), int(np.iinfo(np.int32).max)  # the device counts in int32
MOST_SAMPLES = 65536  # most samples of one request
LONGEST_ROUND = 64  # tokens for each sample in the longest round, if turns are dispatched ahead
LONGEST_KNOWN = 16  # tokens for each sample in the longest round on a CPU, if no stop id can end a sample
# Smaller temperatures would bring logits near the score of forbidden tokens, or beyond float32.
LEAST_TEMPERATURE = 1e-6


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """The bounds of the requests that an engine can serve, and of its rounds and its cache."""

    slots: int  # samples that run at once
    max_sequence_tokens: int  # most tokens of a prompt and its response
    vocabulary: int
    vision: VisionConfig | None = None  # None for a text-only model
    steps_per_sync: int = 4  # tokens for each sample in a round while samples wait
    longest_round: int = 0  # tokens for each sample in the longest round, while no sample waits; 0: `steps_per_sync`
    ahead: bool = False  # a turn of the engine is dispatched before the tokens of the previous turn are read
    small_model: bool = True  # a compilation costs more than the padding of a batch
    kv_tokens: int = 0  # tokens of the cache; 0: all slots at full length
    shadows: bool = False  # patches may be shadow tensors, which the engine fetches
    recurrent: bool = False  # some layers have states, which no page holds
    kept_states: int = 0  # states that are kept between the turns of sessions; 0: such layers compute the whole history

    @staticmethod
    def of(config: DecoderConfig, slots: int, max_sequence_tokens: int, **more: Any) -> EngineLimits:
        """The bounds of an engine with a model of this configuration; `more` sets other fields."""
        more = {"recurrent": config.text.delta is not None, **more}
        return EngineLimits(slots, max_sequence_tokens, config.text.vocab_size, config.vision, **more)

    @property
    def round_tokens(self) -> int:
        """The most tokens for each sample in any round."""
        return max(self.steps_per_sync, self.longest_round)

    @staticmethod
    def pace(device: Any, steps_per_sync: int, ahead: bool | None = None) -> dict[str, Any]:
        """The fields that depend on the device. Turns are dispatched `ahead`, unless told otherwise, but not on a CPU,
        whose cores are the host's, too. A round has `steps_per_sync` tokens for each sample, or (0) 4 while samples
        wait, and up to `LONGEST_ROUND` with `ahead`, or up to `LONGEST_KNOWN` without, while none waits."""
        ahead = device.platform != "cpu" if ahead is None else ahead
        longest = steps_per_sync or (LONGEST_ROUND if ahead else LONGEST_KNOWN)
        return {"steps_per_sync": steps_per_sync or 4, "longest_round": longest, "ahead": ahead}

    @property
    def merge_unit(self) -> int:
        """The number of patches that are merged into a feature."""
        return 1 if self.vision is None else self.vision.merge_unit

    @property
    def pages(self) -> int:
        """The number of pages of the cache."""
        return pages_for(self.kv_tokens) or self.slots * pages_for(self.max_sequence_tokens)


def checked(request: Any, limits: EngineLimits) -> GenerateRequest:
    """The request in plain types. Raises EngineError, one line naming the field, for a request that can't be served."""
    if not isinstance(request, GenerateRequest):
        raise EngineError(f"the request must be a GenerateRequest, not {_shown(request)}")
    if not isinstance(request.rid, str):
        raise EngineError(f"the rid of a request must be a string, not {_shown(request.rid)}")
    try:
        return _checked(request, limits)
    except ValueError as error:
        raise EngineError(f"request {request.rid!r}: {error}") from None


def _checked(request: GenerateRequest, limits: EngineLimits) -> GenerateRequest:
    sampling = checked_sampling(request.sampling, limits.vocabulary)
    prompt = _prompt(request.prompt, limits, sampling.max_new_tokens)
    n = as_integer("n", request.n, 1, MOST_SAMPLES)
    total = len(prompt) + sampling.max_new_tokens
    if total > limits.max_sequence_tokens:
        raise ValueError(
            f"{len(prompt)} prompt tokens + max_new_tokens={sampling.max_new_tokens} = {total} exceed "
            f"rollout.max_sequence_tokens={limits.max_sequence_tokens}"
        )
    if pages_for(total) > limits.pages:
        raise ValueError(
            f"{len(prompt)} prompt tokens + max_new_tokens={sampling.max_new_tokens} take {pages_for(total)} pages of "
            f"{PAGE_TOKENS} tokens; the cache has {limits.pages}: raise rollout.kv_tokens"
        )
    if not isinstance(request.prefix_ids, tuple | list):
        raise ValueError(f"prefix_ids must be a tuple of tuples, not {_shown(request.prefix_ids)}")
    if request.prefix_ids and len(request.prefix_ids) != n:
        raise ValueError(f"{len(request.prefix_ids)} prefixes for n={n} samples")
    prefixes = tuple(_ids(f"prefix_ids[{i}]", ids) for i, ids in enumerate(request.prefix_ids))
    for i, prefix in enumerate(prefixes):
        if prefix:
            _in_vocabulary(f"prefix_ids[{i}]", min(prefix), max(prefix), limits.vocabulary)
    samples = _ids("samples", request.samples)
    if samples and (len(set(samples)) != n or len(samples) != n or min(samples) < 0):
        raise ValueError(f"samples={_shown(samples)} must be n={n} different numbers, none of them negative")
    seed, need = as_integer("seed", request.seed, None, None), as_integer("need", request.need, 0, n)
    if not isinstance(request.session, str):
        raise ValueError(f"session must be a string, not {_shown(request.session)}")
    return GenerateRequest(request.rid, prompt, sampling, n, seed, prefixes, samples, need, request.session)


def ended_before(ids: Sequence[int], sampling: SamplingParams) -> FinishReason | None:
    """The reason for which a response with these tokens is already complete; None if it continues."""
    if ids and ids[-1] in sampling.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(ids) >= sampling.max_new_tokens else None


def checked_sampling(sampling: Any, vocabulary: int) -> SamplingParams:
    """The sampling of a request in plain types. Raises ValueError, one line naming the field."""
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling must be SamplingParams, not {_shown(sampling)}")
    temperature, top_p = (as_number(name, getattr(sampling, name)) for name in ("temperature", "top_p"))
    if temperature and not LEAST_TEMPERATURE <= temperature <= float(np.finfo(np.float32).max):
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or a float32 of at least {LEAST_TEMPERATURE}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be in (0, 1]")
    # Ids outside the vocabulary can't be sampled. They are dropped, so that no list is longer than the vocabulary.
    stop, forbidden = (
        tuple(sorted({id for id in _ids(name, getattr(sampling, name)) if 0 <= id < vocabulary}))
        for name in ("stop_ids", "forbidden_ids")
    )
    if len(forbidden) == vocabulary:
        raise ValueError("forbidden_ids has every token of the vocabulary")
    return SamplingParams(
        max_new_tokens=as_integer("max_new_tokens", sampling.max_new_tokens, 1),
        temperature=temperature,
        top_p=top_p,
        top_k=as_integer("top_k", sampling.top_k, 0),
        stop_ids=stop,
        forbidden_ids=forbidden,
    )


def _prompt(prompt: Any, limits: EngineLimits, max_new_tokens: int) -> ModelInput:
    if not isinstance(prompt, ModelInput):
        raise ValueError(f"prompt must be a ModelInput, not {_shown(prompt)}")
    tokens_T = _integers("prompt.token_ids_T", prompt.token_ids_T, (None,))
    T = len(tokens_T)
    if not T:
        raise ValueError("the prompt has no tokens")
    _in_vocabulary("prompt.token_ids_T", int(tokens_T.min()), int(tokens_T.max()), limits.vocabulary)
    vision, features = None, 0
    if prompt.vision is not None:
        if limits.vision is None:
            raise ValueError("the prompt has images or videos, but the model is text-only")
        vision = _vision(prompt.vision, limits.vision, limits.shadows)
        features = vision.num_patches // limits.vision.merge_unit
    return ModelInput(
        tokens_T,
        _integers("prompt.positions_3T", prompt.positions_3T, (3, T)),
        _integers("prompt.feature_index_T", prompt.feature_index_T, (T,), -1, features - 1),
        as_integer("prompt.next_position", prompt.next_position, LEAST, MOST - max_new_tokens),
        vision,
    )


def _vision(vision: Any, config: VisionConfig, shadows: bool) -> VisionInput:
    if not isinstance(vision, VisionInput):
        raise ValueError(f"prompt.vision must be a VisionInput, not {_shown(vision)}")
    if vision.route is not None:
        raise ValueError("prompt.vision.route must be None: engines take prompts before media are routed")
    patches_PX = _patches(vision.patches_PX, config.patch_values, shadows)
    P = len(patches_PX)
    if not P or P % config.merge_unit:
        raise ValueError(f"prompt.vision has {P} patches, which must be a multiple of {config.merge_unit}")
    frames_P = _integers("prompt.vision.frame_segments_P", vision.frame_segments_P, (P,), 0, P)
    bound = as_integer("prompt.vision.frame_bound", vision.frame_bound, 0)
    longest = int(np.bincount(frames_P)[1:].max(initial=0))
    if 0 < bound < longest:
        raise ValueError(f"prompt.vision.frame_bound={bound} is too small: a frame pair has {longest} patches")
    return VisionInput(
        patches_PX,
        _integers("prompt.vision.positions_P2", vision.positions_P2, (P, 2)),
        frames_P,
        _integers("prompt.vision.window_segments_P", vision.window_segments_P, (P,), 0, P),
        bound,
    )


def _patches(patches_PX: Any, values: int, shadows: bool) -> np.ndarray | ShadowTensor:
    """The checked patches. Of a shadow tensor, whose values are fetched later, only shape and dtype are checked."""
    name = "prompt.vision.patches_PX"
    if isinstance(patches_PX, ShadowTensor):
        if not shadows:
            raise ValueError(f"{name} is a shadow tensor ({patches_PX!r}), but this engine was made without `fetch`")
        if patches_PX.ndim != 2 or patches_PX.shape[1] != values or patches_PX.dtype != np.float32:
            stands_for = f"{patches_PX.dtype} {patches_PX.shape}"
            raise ValueError(f"{name} is a shadow tensor of {stands_for}; it must be float32 (P, {values})")
        return patches_PX
    array = _array(name, patches_PX, (None, values), jnp.floating).astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has NaN or infinity among its pixels")
    return array


def _is_integer(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and not issubclass(kind, bool)


def as_integer(name: str, value: Any, least: int | None = LEAST, most: int | None = MOST) -> int:
    """The value as an int. Raises ValueError, naming the field, for a value that is no integer or out of bounds."""
    if not _is_integer(type(value)):
        raise ValueError(f"{name}={_shown(value)} must be an integer")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name}={_shown(value)} must be in {least} .. {most}")
    return int(value)


def as_number(name: str, value: Any) -> float:
    """The value as a float. Raises ValueError, naming the field, for a value that is no finite number."""
    if not (_is_integer(type(value)) or isinstance(value, float | np.floating)):
        raise ValueError(f"{name}={_shown(value)} must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={number} must be finite")
    return number


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    """The token ids as plain integers. Each type of an id is checked once, since prefixes are long."""
    flat = isinstance(ids, tuple | list) or (isinstance(ids, np.ndarray) and ids.ndim == 1)
    if not flat or not all(map(_is_integer, set(map(type, ids)))):
        raise ValueError(f"{name}={_shown(ids)} must be a tuple of integers")
    plain = tuple(map(int, ids))
    if plain and not LEAST <= min(plain) <= max(plain) <= MOST:
        raise ValueError(f"{name}={_shown(ids)} must be in {LEAST} .. {MOST}")
    return plain


def _in_vocabulary(name: str, least: int, most: int, vocabulary: int) -> None:
    if not 0 <= least <= most < vocabulary:
        raise ValueError(f"token ids {least} .. {most} of {name} are not all in the vocabulary of {vocabulary} tokens")


def _array(name: str, value: Any, shape: tuple[int | None, ...], kind: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray | jax.Array) or not jnp.issubdtype(value.dtype, kind):
        raise ValueError(f"{name} must be an array of {kind.__name__} numbers, not {_shown(value)}")
    wanted = tuple(have if want is None else want for want, have in zip(shape, value.shape, strict=False))
    if value.shape != wanted or len(shape) != value.ndim:
        raise ValueError(f"{name} has the shape {value.shape}; it must be {shape}".replace("None", "any"))
    return np.asarray(value)


def _integers(name: str, value: Any, shape: tuple[int | None, ...], least: int = LEAST, most: int = MOST) -> np.ndarray:
    array = _array(name, value, shape, jnp.integer)
    if array.size and not least <= int(array.min()) <= int(array.max()) <= most:
        raise ValueError(f"{name} has values of {array.min()} .. {array.max()}; they must be in {least} .. {most}")
    return array.astype(np.int32, copy=False)


def _shown(value: Any) -> str:
    """The value in a short line: an int of 5,000 digits has no `repr`, and the `repr` of an array has several lines."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:
        return f"a {type(value).__name__}"


class Mailbox:
    """Chunks on their way to one consumer. The engine holds no stream, so that dropping it aborts the request."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        # Chunks, then an error or None at the end.
        self._items: asyncio.Queue[TokenChunk | Exception | None] = asyncio.Queue()
        self._closed = False

    def put(self, chunk: TokenChunk) -> None:
        if not self._closed:
            self._items.put_nowait(chunk)

    def discard(self) -> None:
        """Drops the chunks of a consumer that went away, and refuses further chunks."""
        while not self._items.empty():
            self._items.get_nowait()
        self._closed = False  # the dropped items may include the end, which `close` puts again
        self.close()

    def close(self, error: Exception | None = None) -> None:
        """Refuses further chunks. The consumer gets the remaining chunks, then the error or the end."""
        if not self._closed and not self.loop.is_closed():
            self._closed = True
            self._items.put_nowait(error)

    async def get(self) -> TokenChunk | None:
        """The next chunk; None at the end. Raises the error that the mailbox was closed with."""
        item = await self._items.get()
        if not isinstance(item, TokenChunk):
            self._items.put_nowait(item)  # for the next call
            if item is not None:
                raise item
        return item


class TokenStream(AsyncIterator[TokenChunk]):
    """The stream that `generate` returns. `abandon` is called once, on the event loop, when the consumer goes away."""

    def __init__(self, mailbox: Mailbox, abandon: Callable[[], object]) -> None:
        self._mailbox, self._abandon = mailbox, abandon
        self._dropped = weakref.finalize(self, _from_any_thread, mailbox.loop, abandon)
        self._dropped.atexit = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenChunk:
        try:
            chunk = await self._mailbox.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Aborts the samples that still run, and drops unread chunks."""
        self._mailbox.discard()
        if self._dropped.detach() is not None:
            self._abandon()


def _from_any_thread(loop: asyncio.AbstractEventLoop, abandon: Callable[[], object]) -> None:
    """Abandons a stream on its loop; any thread may have collected the stream. Does nothing if the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(abandon)
