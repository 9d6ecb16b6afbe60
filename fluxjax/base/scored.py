"""A prompt, a response to it and its reward. JAX is not imported: processes that score need none.

Other code imports these classes from `base/types.py`, with all other data of a step.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, Int32

from .medium import Media
from .response_bytes import bytes_of, head_of, numbers_of, version_span_of

_COLUMNS = {"token_ids": "tokens", "logprobs": "logprobs", "versions": "versions"}  # in `ResponseNumbers`


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question as the coordinator sees it: no pixels and no tokens.

    `text` has one `<image>` or `<video>` mark for each media item, in order. `id` is unique within its source; `draw`
    counts the prompts drawn in this run, and orders everything that must not depend on time; `row` is the record's
    number in its source.
    """

    id: str
    source: str
    text: str
    answer: str
    media: tuple[Media, ...] = ()
    draw: int = 0
    epoch: int = 0
    row: int = 0
    tokens: int = 0  # tokens of the prepared prompt; 0: unknown


@dataclasses.dataclass(frozen=True)
class Response:
    """The tokens that an engine generated for one sample of a prompt. The three tuples have one entry for each token.

    `logprobs` are natural logs of the probability under the sampling distribution (the behaviour policy); `versions`
    are the weight versions that the tokens come from. Raises ValueError if the tuples differ in length.
    """

    rid: str
    draw: int  # `Prompt.draw` of its prompt
    sample: int  # 0 <= sample < G
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: str  # a `FinishReason` value: stop, length, abort
    temperature: float | None = None  # sampling temperature; None: `rollout.temperature`

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"response {self.rid}: {len(self.token_ids)} tokens, {len(self.logprobs)} logprobs, "
                f"{len(self.versions)} versions; the three must be equal"
            )

    @functools.cached_property  # reading a tuple takes longer than all other work on a response
    def data(self) -> bytes:
        """The response's numbers as bytes (`response_bytes`), as they are sent to other processes."""
        return bytes_of(self.sample, self.temperature, self.token_ids, self.logprobs, self.versions)

    @property
    def arrays(self) -> tuple[Int32[np.ndarray, " T"], Float32[np.ndarray, " T"], Int32[np.ndarray, " T"]]:
        """Tokens, log-probs and versions."""
        numbers = numbers_of(self.data)
        return numbers.tokens, numbers.logprobs, numbers.versions

    @classmethod
    def of(cls, draw: int, data: bytes) -> "Response":
        """Returns the response to draw `draw` whose numbers `data` holds: packed, and without a `rid`."""
        head = head_of(data)
        response = cls("", draw, head.sample, (), (), (), "stop", head.temperature)
        return response._packed(data, head.tokens)

    def packed(self) -> "Response":
        """Drops the three tuples, keeps `data`, and returns this same response. The tuples take four to twelve times as
        much memory; afterwards each access builds a tuple anew. Log-probs become float32."""
        return self._packed(self.data, self.num_tokens)

    def _packed(self, data: bytes, num_tokens: int) -> "Response":
        for name in _COLUMNS:
            vars(self).pop(name, None)
        vars(self).update(data=data, num_tokens=num_tokens)
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
        """The oldest and the newest version of the tokens; -1 for both if there is no token."""
        if self.is_packed:
            return version_span_of(self.data)
        versions = self.versions
        # true of most responses, and several times as fast
        if versions and versions.count(versions[0]) == len(versions):
            return versions[0], versions[0]
        return min(versions, default=-1), max(versions, default=-1)

    @functools.cached_property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A response as rewards see it: the prompt, the answering text, and how the generation ended."""

    prompt: Prompt
    text: str
    num_tokens: int = 0
    finish: str = "stop"  # as `Response.finish`


@dataclasses.dataclass(frozen=True)
class Reward:
    """The score of a response. `value` enters the advantage; `correct` is the exact match that accuracy counts. For a
    reward that crashed or timed out, `value` is 0 and `reason` says why. `parts` are the rewards of a mixture by name,
    before their weights; `seconds` is the time that scoring took."""

    value: float
    correct: bool
    reason: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    seconds: float = dataclasses.field(default=0.0, compare=False)  # a measurement, ignored when scores are compared
