"""Prompts, responses and rewards. JAX is not imported, because processes that score need no JAX.

`base/types.py` exports these classes, too.

The numbers of a response are written once as little-endian bytes (`bytes_of`):

- a head with the sample's number, the number of tokens, the number of runs of versions, the bytes of a token, and the
  temperature;
- runs of (version, number of tokens);
- log-probs as float32, and then tokens as uint16 if all tokens fit, else as int32.
"""

import dataclasses
import functools
import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from .medium import CONTEXT, TURN, WHOLE, Media, MediaKind

ENVIRONMENT = -2  # the version of tokens that the environment said
Turns = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]  # token ids of each turn, and of the observation behind it


def request_seed(seed: int, draw: int) -> int:
    """Returns the seed of the requests and of the environments of a draw, which fits an int32 and differs for all draws
    of a run. `seed` is `config.seed`."""
    return (seed * 0x9E3779B1 + draw) % 2**31


_HEAD = struct.Struct("<iiiid")
_TOKENS = {2: np.dtype("<u2"), 4: np.dtype("<i4")}  # by a token's size in bytes
_RUN = np.dtype("<i4")  # the type of a version and of a number of tokens
# The tuples of `Response`, with their names in `ResponseNumbers`.
_COLUMNS = {"token_ids": "tokens", "logprobs": "logprobs", "versions": "versions"}

State = dict[str, Any]  # JSON-serialisable
SavedState = Mapping[str, Any]  # a `State` as JSON gives it back


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question without pixels and tokens. `text` has one `<image>` or `<video>` mark for each media item, in order.
    `id` is unique within its source. `draw` is the prompt's number in the order of this run. `row` is the record's
    number in its source. `environment` names what answers each turn of a response (empty: a response is one turn)."""

    id: str
    source: str
    text: str
    answer: str
    media: tuple[Media, ...] = ()
    draw: int = 0
    epoch: int = 0
    row: int = 0
    tokens: int = 0  # tokens of the prepared prompt, 0 if unknown
    patches: int = 0  # patches of its images and videos
    environment: str = ""
    context: str = WHOLE  # what a turn sees of its episode (`CONTEXT`)
    opening: tuple[int, int] = (0, 0)  # characters and media at the end that the environment showed when it began

    def opened(self, text: str, media: tuple[Media, ...]) -> "Prompt":
        """Returns the prompt with the first observation of its environment behind it."""
        shown = f"{self.text}\n{text}" if self.text and text else self.text or text
        added = len(shown) - len(self.text), len(media)
        return dataclasses.replace(self, text=shown, media=(*self.media, *media), opening=added)

    @property
    def shown(self) -> str:
        """A digest of the environment, of its context, and of what the model sees. Folders of media don't count."""
        names = [(medium.kind.value, medium.path.rpartition("/")[2], medium.cell) for medium in self.media]
        return hashlib.sha256(repr((self.environment, self.context, self.text, names)).encode()).hexdigest()[:16]

    @property
    def record(self) -> "Prompt":
        """The prompt without the first observation of its environment."""
        text, media = (len(whole) - added for whole, added in zip((self.text, self.media), self.opening, strict=True))
        return dataclasses.replace(self, text=self.text[:text], media=self.media[:media], opening=(0, 0))


@dataclasses.dataclass(frozen=True)
class Response:
    """The tokens of one sample of a prompt: those that an engine generated and, if the sample has several turns, those
    of its environment's observations between them. The first three tuples have one entry for each token. `logprobs` are
    natural logs of the probability under the sampling distribution (the behaviour policy); `versions` are the weight
    versions that the tokens come from. A token of the environment has version `ENVIRONMENT` and log-prob 0, and is not
    trained on. `media` are the images and videos of the observations, in the order of their placeholders, and
    `media_counts` the number of each observation's media. `rewards` are those of the environment, one for each of its
    answers. Raises ValueError if the first three tuples differ in length."""

    rid: str
    draw: int  # `Prompt.draw` of the response's prompt
    sample: int  # 0 <= sample < G
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: str  # a `FinishReason` value: stop, length, abort
    temperature: float | None = None  # sampling temperature; None: `rollout.temperature`
    media: tuple[Media, ...] = ()
    rewards: tuple[float, ...] = ()
    media_counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"response {self.rid}: {len(self.token_ids)} tokens, {len(self.logprobs)} logprobs, "
                f"{len(self.versions)} versions; the three must be equal"
            )

    @functools.cached_property  # cached, because reading the tuples takes longer than all other work on a response
    def data(self) -> bytes:
        """The response's numbers as bytes (`bytes_of`), as they are sent to other processes."""
        return bytes_of(self.sample, self.temperature, self.token_ids, self.logprobs, self.versions)

    def packed(self) -> "Response":
        """Drops the three tuples, keeps `data`, and returns the response itself. The tuples take four to twelve times
        the memory of `data`. Each later access builds the tuple anew, with log-probs rounded to float32."""
        _ = self.data, self.num_tokens
        for name in _COLUMNS:
            vars(self).pop(name, None)
        return self

    @property
    def is_packed(self) -> bool:
        return "token_ids" not in vars(self)

    if not TYPE_CHECKING:  # type checkers see the declared fields

        def __getattr__(self, name: str) -> tuple:
            if name not in _COLUMNS or "data" not in vars(self):
                raise AttributeError(f"a response has no {name!r}", name=name, obj=self)
            return tuple(getattr(numbers_of(self.data), _COLUMNS[name]).tolist())

    @property
    def version_span(self) -> tuple[int, int]:
        """The oldest and the newest version of the generated tokens, or (-1, -1) without such tokens."""
        if self.is_packed:
            return version_span_of(self.data)
        versions = self.versions
        # Most responses have one version, which `count` shows faster than `min` and `max`.
        if versions and versions.count(versions[0]) == len(versions):
            return (-1, -1) if versions[0] == ENVIRONMENT else (versions[0], versions[0])
        return _span(versions)

    @functools.cached_property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @functools.cached_property
    def num_trained(self) -> int:
        """The number of tokens that are trained on: all but those of the environment."""
        return trained_of(self.data) if self.is_packed else self.num_tokens - self.versions.count(ENVIRONMENT)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The tokens behind the newest observation: all tokens of a response of one turn."""
        ids, versions = self.token_ids, self.versions
        return ids[len(ids) - versions[::-1].index(ENVIRONMENT) :] if ENVIRONMENT in versions else ids

    @property
    def observed_media(self) -> list[tuple[Media, ...]]:
        """The media of each observation."""
        ends = accumulate(self.media_counts)
        return [self.media[end - count : end] for end, count in zip(ends, self.media_counts, strict=True)]

    @property
    def turn_tokens(self) -> list[int]:
        """The number of tokens that the model generated in each turn; [0] for a response without tokens."""
        versions = numbers_of(self.data).versions
        return np.bincount(turn_numbers(versions)[versions != ENVIRONMENT], minlength=1).tolist()

    def turn_rewards(self, total: float) -> list[float]:
        """Returns rewards of the turns with the sum `total`. The last turn gets what the environment did not give."""
        rewards = [*self.rewards, *[0.0] * (len(self.turn_tokens) - len(self.rewards))]
        return [*rewards[:-1], rewards[-1] + (total - sum(self.rewards))]

    def to_json(self) -> State:
        """Returns the fields as JSON values. Versions are runs [version, number of tokens]."""
        runs = [[version, len(list(run))] for version, run in groupby(self.versions)]
        columns = {"token_ids": list(self.token_ids), "logprobs": list(self.logprobs), "versions": runs}
        media = [dataclasses.asdict(medium) | {"kind": medium.kind.value} for medium in self.media]
        lists = {"media": media, "rewards": list(self.rewards), "media_counts": list(self.media_counts)}
        return dataclasses.asdict(self) | columns | lists

    @classmethod
    def from_json(cls, saved: SavedState) -> "Response":
        versions = tuple(version for version, count in saved["versions"] for _ in range(count))
        tokens, logprobs = tuple(saved["token_ids"]), tuple(saved["logprobs"])
        media = tuple(Media(**{**fields, "kind": MediaKind(fields["kind"])}) for fields in saved.get("media", ()))
        lists = {name: tuple(saved.get(name, ())) for name in ("rewards", "media_counts")}
        columns = {"token_ids": tokens, "logprobs": logprobs, "versions": versions}
        return cls(**{**saved, **columns, **lists, "media": media}).packed()


@dataclasses.dataclass(frozen=True)
class Completion:
    """The input of a reward: the prompt, the text of the response's last turn, the number of tokens that the model
    said, the way in which the generation ended, and the rewards of the environment (`Response.rewards`)."""

    prompt: Prompt
    text: str
    num_tokens: int = 0
    finish: str = "stop"  # as `Response.finish`
    rewards: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reward:
    """The score of a response. `value` enters the advantage; `correct` says whether accuracy counts the response as
    right. `reason` explains the value, for example the value 0 of a reward that crashed. `parts` are the unweighted
    rewards of a mixture, by name. `seconds` is the time of scoring."""

    value: float
    correct: bool
    reason: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    seconds: float = dataclasses.field(default=0.0, compare=False)  # not compared, because it is a measurement


class ResponseNumbers(NamedTuple):
    """The numbers of a response."""

    sample: int
    temperature: float | None
    tokens: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    versions: Int32[np.ndarray, " T"]


def bytes_of(
    sample: int, temperature: float | None, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
) -> bytes:
    """Writes the numbers of a response. Raises ValueError for tokens, log-probs or versions beyond 32 bits."""
    count = len(tokens)
    if count and versions.count(versions[0]) == count:
        runs = [versions[0], count]
    else:
        runs = [n for version, run in groupby(versions) for n in (version, len(list(run)))]
    try:
        width, ids = 2, struct.pack(f"<{count}H", *tokens)  # `struct` reads a tuple twice as fast as NumPy
    except struct.error:
        width, ids = 4, _packed(f"<{count}i", tokens)
    values = _packed(f"<{count}f", logprobs)
    head = _HEAD.pack(sample, count, len(runs) // 2, width, math.nan if temperature is None else temperature)
    return b"".join((head, _packed(f"<{len(runs)}i", runs), values, ids))


def _packed(form: str, values: Sequence[int] | Sequence[float]) -> bytes:
    try:
        return struct.pack(form, *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"numbers of a response can't be packed: {error}") from error


class ResponseHead(NamedTuple):
    """The head of a response's bytes. `size` is the number of bytes of the entire response."""

    sample: int
    temperature: float | None
    tokens: int  # number of tokens
    runs: int  # number of runs of versions
    width: int  # bytes of a token
    size: int


def head_of(data: bytes | memoryview, start: int = 0) -> ResponseHead:
    """Reads the head of a response that `bytes_of` wrote, at byte `start` of `data`. Raises ValueError for other bytes,
    and for a response that is cut off."""
    try:
        sample, count, runs, width, temperature = _HEAD.unpack_from(data, start)
    except struct.error as error:
        raise ValueError(f"a response is cut off: {error}") from error
    if count < 0 or runs < 0 or width not in _TOKENS:
        raise ValueError(
            f"the head of a response is damaged: it says {count} tokens of {width} bytes and {runs} runs of versions"
        )
    size = _HEAD.size + 2 * _RUN.itemsize * runs + (4 + width) * count
    if len(data) < start + size:
        raise ValueError(f"a response is cut off: {len(data) - start} of {size} bytes")
    return ResponseHead(sample, None if math.isnan(temperature) else temperature, count, runs, width, size)


def numbers_of(data: bytes | memoryview) -> ResponseNumbers:
    """Reads the numbers that `bytes_of` wrote. Raises ValueError for other bytes."""
    sample, temperature, count, runs, width, _ = head_of(data)
    pairs = struct.unpack_from(f"<{2 * runs}i", data, _HEAD.size)  # NumPy takes three times as long for one pair
    versions, counts = pairs[::2], pairs[1::2]
    at = _HEAD.size + 2 * runs * _RUN.itemsize
    logprobs = np.frombuffer(data, "<f4", count, at)
    at += logprobs.nbytes
    ids = np.frombuffer(data, _TOKENS[width], count, at)
    if min(counts, default=1) < 1 or sum(counts) != count:
        raise ValueError(f"the runs of versions have {list(counts)} tokens, but the response has {count}")
    versions_T = np.repeat(np.array(versions, np.int32), np.array(counts, np.int64))
    return ResponseNumbers(
        sample, temperature, ids.astype(np.int32), logprobs.astype(np.float32, copy=False), versions_T
    )


def turns_of(response: Response) -> Turns:
    """Returns (token ids of the turn, token ids of the observation behind it) for each turn of a response."""
    turns: list[tuple[list[int], list[int]]] = []
    for token, version in zip(response.token_ids, response.versions, strict=True):
        if version == ENVIRONMENT:
            turns[-1][1].append(token)
        elif not turns or turns[-1][1]:
            turns.append(([token], []))
        else:
            turns[-1][0].append(token)
    return [(tuple(said), tuple(seen)) for said, seen in turns]


def turn_numbers(versions_T: np.ndarray) -> np.ndarray:
    """Returns the turn of each token of a response, from 0 on. An observation belongs to the turn before it."""
    said_T = (versions_T != ENVIRONMENT).astype(np.int8)
    return np.cumsum(np.diff(said_T, prepend=np.int8(1)) == 1)


def views_of(versions_T: np.ndarray, media_T: np.ndarray, context: str) -> list[tuple[np.ndarray, int]]:
    """Divides an episode where its context was rewritten. Returns, for each view, the indices of the response's tokens
    that the view has, ascending, and the index of the first token of the view's own turns. What was sampled before is
    history. Every sampled token is of one view's own turns, and the last view is what the engine sees next.

    `media_T` has the number of the medium that a token belongs to, from 1 on in order (0: text). `context` is a text
    that `CONTEXT` matches. With `turn`, a view has the last token of the turn before, which ended it."""
    begins_T = np.diff((versions_T != ENVIRONMENT).astype(np.int8), prepend=np.int8(1)) == -1
    block_T = np.cumsum(begins_T)  # an observation is in one block with the turn behind it
    key_T, found = block_T, CONTEXT.fullmatch(context)  # the key changes where the context is rewritten
    assert found is not None
    if context != TURN:  # the key is the number of media that are left out
        seen_T = np.maximum.accumulate(media_T)[np.searchsorted(block_T, block_T, "right") - 1]
        key_T = np.maximum(seen_T - int(found[1]), 0) if found[1] else np.zeros_like(block_T)
        key_T = np.maximum(key_T, key_T[np.argmax(seen_T > 0)])  # what was never seen rewrites nothing
    views = []
    for key in np.unique(key_T).tolist():
        first, end = np.searchsorted(key_T, [key, key + 1]).tolist()
        kept_T = (media_T[:end] == 0) | (media_T[:end] > key)
        if context == TURN:
            kept_T = np.arange(end) >= first - 1
        views.append((np.flatnonzero(kept_T), first))
    return views


def version_span_of(data: bytes) -> tuple[int, int]:
    """Returns the oldest and the newest version of generated tokens in bytes of `bytes_of`, or (-1, -1) without such
    tokens."""
    return _span(_runs_in(data)[::2])


def trained_of(data: bytes) -> int:
    """Returns the number of tokens that are trained on, in bytes of `bytes_of`."""
    runs = _runs_in(data)
    return sum(count for version, count in zip(runs[::2], runs[1::2], strict=True) if version != ENVIRONMENT)


def _runs_in(data: bytes) -> tuple[int, ...]:
    _, _, runs, _, _ = _HEAD.unpack_from(data)
    return struct.unpack_from(f"<{2 * runs}i", data, _HEAD.size)


def _span(versions: Sequence[int]) -> tuple[int, int]:
    generated = [version for version in versions if version != ENVIRONMENT]
    return min(generated, default=-1), max(generated, default=-1)
