"""The data of one RL step, aligned with tokens, from a prompt to a batch that is trained on.

`T` is the number of tokens of a response or of a packed row, `G` the responses of a group, `B` the rows of a batch.
Everything is host data (numpy, tuples) but `TrainBatch`, a pytree that crosses into `jit`.
"""

import dataclasses
import enum
import typing
from collections.abc import Mapping

import jax
from jaxtyping import Float32, Int32

from models.inputs import AnyArray, ModelInput, PackedTokens


class MediaKind(enum.Enum):
    IMAGE = "image"
    VIDEO = "video"


@dataclasses.dataclass(frozen=True)
class Media:
    """A media file by reference: pixels are decoded where they are used. `data` holds the encoded bytes if the record
    embeds them (parquet)."""

    kind: MediaKind
    path: str
    data: bytes | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question as the coordinator knows it: no pixels and no tokens.

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
    tokens: int = 0  # tokens of the prepared prompt; 0: not known


@dataclasses.dataclass(frozen=True)
class PreparedPrompt:
    """A prompt whose media are decoded and whose text is tokenised, as engines and trainer read it."""

    prompt: Prompt
    inputs: ModelInput


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


@dataclasses.dataclass(frozen=True)
class Reward:
    """The score of a response. `value` enters the advantage; `correct` is the exact match that accuracy counts. A
    reward that crashed or timed out has the value 0 and says so in `reason`."""

    value: float
    correct: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A scored response. `advantage` is one number, broadcast over the response's tokens in the batch."""

    response: Response
    reward: Reward
    advantage: float = 0.0


@dataclasses.dataclass(frozen=True)
class Group:
    """All samples of one prompt, the unit of GRPO; a group is never split between steps."""

    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclasses.dataclass(frozen=True)
class TrainedStep:
    """An optimizer step, as it was made and what it found: its groups by draw, with their advantages; its metrics."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]


def has_variance(group: Group) -> bool:
    """Says whether rewards differ within the group. If they do not, all advantages are 0, and the group teaches nothing
    (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2)."""
    return any(sample.reward.value != group.samples[0].reward.value for sample in group.samples)


@typing.no_type_check  # see `models.inputs.VisionInput`
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """One microbatch of packed rows with its training targets, all aligned with `inputs.tokens_BT`.

    The loss of a whole step is the plain sum over its microbatches, rows and tokens of
    `loss_weights_BT * token_loss_BT`: every normalisation (by tokens, sequences, groups, or a constant) is
    already in the weights, which makes loss and gradients independent of packing, microbatching and sharding.
    """

    inputs: PackedTokens
    loss_weights_BT: Float32[AnyArray, "B T"]  # 0 where a token is not trained on
    advantages_BT: Float32[AnyArray, "B T"]
    behaviour_logprobs_BT: Float32[AnyArray, "B T"]  # in nats, as reported by the engine
    reference_logprobs_BT: Float32[AnyArray, "B T"]  # in nats, of the frozen reference model; 0 where there is none
    # In nats, mean of log(trainer / engine) over the token's response; 0 until filled in.
    response_log_ratios_BT: Float32[AnyArray, "B T"]
    # Optimizer steps since the weights that generated the token; -1 for prompts, given answers and padding.
    lags_BT: Int32[AnyArray, "B T"]
