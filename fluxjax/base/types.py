"""The data of one RL step, token-aligned. This is the one place where these things are defined.

Lengths: `T` is the number of tokens of a response (or of a packed row), `G` responses a group, `B` rows.
Everything is host data (numpy, tuples); `TrainBatch` is a pytree that crosses into `jit`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax

from models.inputs import ModelInput, PackedTokens


class MediaKind(enum.Enum):
    IMAGE = "image"
    VIDEO = "video"


@dataclasses.dataclass(frozen=True)
class Media:
    """A media file, by reference: pixels are decoded where they are used. `data` holds encoded bytes for
    records that embed them (parquet)."""

    kind: MediaKind
    path: str
    data: bytes | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question as the controller knows it: metadata only.

    `text` has one `<image>` or `<video>` mark for each media item, in order. `id` is unique within its source;
    `draw` counts prompts drawn in this run (unique; the order key for everything deterministic); `row` is where the
    record stands in its source.
    """

    id: str
    source: str
    text: str
    answer: str
    media: tuple[Media, ...] = ()
    draw: int = 0
    epoch: int = 0
    row: int = 0
    tokens: int = 0  # of the prepared prompt; 0: not known


@dataclasses.dataclass(frozen=True)
class PreparedPrompt:
    """A prompt whose media are decoded and whose text is tokenised: what engine and trainer both read."""

    prompt: Prompt
    inputs: ModelInput


@dataclasses.dataclass(frozen=True)
class Response:
    """What an engine generated for one sample of a prompt. The three tuples have one entry a token.

    `logprobs`: natural log of the probability under the sampling distribution (behaviour policy).
    `versions`: the weight version that produced each token.
    """

    rid: str
    draw: int  # of its prompt
    sample: int  # 0 <= sample < G
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: str  # a `FinishReason` value: stop, length, abort
    temperature: float | None = None  # of sampling; None: `rollout.temperature`

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"response {self.rid}: {len(self.token_ids)} tokens, {len(self.logprobs)} logprobs, "
                f"{len(self.versions)} versions; the three must be equal"
            )


@dataclasses.dataclass(frozen=True)
class Reward:
    """A score with its parts. `value` enters the advantage; `correct` is the exact-match used as accuracy.
    A reward that crashed or timed out has value 0 and says so in `reason`."""

    value: float
    correct: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A scored response. `advantage` is one number a response, broadcast over its tokens in the batch."""

    response: Response
    reward: Reward
    advantage: float = 0.0


@dataclasses.dataclass(frozen=True)
class Group:
    """All samples of one prompt: the unit of GRPO, never split between batches."""

    prompt: Prompt
    samples: tuple[Sample, ...]


def has_variance(group: Group) -> bool:
    """Whether rewards differ within the group. Where they don't, it teaches nothing: all right, or all wrong (DAPO's
    dynamic sampling, arXiv:2503.14476, section 3.2)."""
    return any(sample.reward.value != group.samples[0].reward.value for sample in group.samples)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """One microbatch of packed rows with its training targets, all aligned with `inputs.tokens_BT`.

    The loss of a whole step is the plain sum over its microbatches, rows and tokens of
    `loss_weights_BT * token_loss_BT`: every normalisation (by tokens, sequences, groups, or a constant) is
    already in the weights, which makes loss and gradients independent of packing, microbatching and sharding.
    """

    inputs: PackedTokens
    loss_weights_BT: Any  # f32, 0 where a token is not trained on
    advantages_BT: Any  # f32
    behaviour_logprobs_BT: Any  # f32, as reported by the engine
    reference_logprobs_BT: Any  # f32, of the frozen reference model; 0 where there is none
    response_log_ratios_BT: Any  # f32, mean of log(trainer / engine) over the token's response; 0 until filled in
    lags_BT: Any  # i32, steps since the weights that generated the token; -1 for prompts, given answers and padding
