"""The data of an RL step, from a prompt to a batch that is trained on.

All data are on the host (numpy, tuples), except for `TrainBatch`, a pytree that `jit` takes.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int32

from models.inputs import AnyArray, PackedTokens, PromptInput

from .medium import Media as Media
from .medium import MediaKind as MediaKind
from .scored import ENVIRONMENT as ENVIRONMENT
from .scored import Completion as Completion
from .scored import Prompt as Prompt
from .scored import Response as Response
from .scored import Reward as Reward
from .scored import SavedState as SavedState
from .scored import State as State


@dataclasses.dataclass(frozen=True)
class PreparedPrompt:
    """A prompt whose media are decoded and whose text is tokenised. `responses` has, by `Response.sample`, the inputs
    of each response whose observations have media. They have the response's tokens only. Rotary positions go on behind
    the prompt, and features count from the response's own first one."""

    prompt: Prompt
    inputs: PromptInput
    responses: Mapping[int, PromptInput] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A scored response. All tokens of the model have the `advantage`, unless there are `turn_advantages`: these are of
    the tokens of each turn, and `advantage` is their mean over tokens."""

    response: Response
    reward: Reward
    advantage: float = 0.0
    turn_advantages: tuple[float, ...] = ()


class Columns(NamedTuple):
    """The numbers that a step reads of a group's responses, side by side in memory, in contrast to response objects."""

    draw: int  # `Prompt.draw`
    # int64: `Response.sample`, number of tokens, newest version of a token (-1 without tokens), `Response.num_trained`
    numbers_G4: np.ndarray
    advantages_GU: np.ndarray  # float64; one for all turns of a response, or one for each
    data: tuple[bytes, ...]  # `Response.data`

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Columns":
        responses = [sample.response for sample in samples]
        rows = [sample.turn_advantages or (sample.advantage,) for sample in samples]
        turns = max(map(len, rows), default=1)
        numbers = [(r.sample, r.num_tokens, r.version_span[1], r.num_trained) for r in responses]
        return cls(
            responses[0].draw if responses else -1,
            np.array(numbers, np.int64).reshape(-1, 4),
            np.array([(*row, *(0.0,) * (turns - len(row))) for row in rows], np.float64).reshape(-1, turns),
            tuple(response.data for response in responses),
        )


@dataclasses.dataclass(frozen=True)
class Group:
    """All samples of one prompt. A group is never split between steps."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @functools.cached_property  # `packed` builds the columns while other groups are generated
    def columns(self) -> Columns:
        return Columns.of(self.samples)

    def packed(self) -> "Group":
        """Builds `columns` if every response has only its `data` (`Response.packed`), and returns the group itself."""
        if all(sample.response.is_packed for sample in self.samples):
            _ = self.columns
        return self

    def with_advantages(self, advantages_G: Sequence[float] | np.ndarray) -> "Group":
        values_G = np.asarray(advantages_G, np.float64)
        pairs = zip(self.samples, values_G.tolist(), strict=True)
        samples = tuple(dataclasses.replace(sample, advantage=value, turn_advantages=()) for sample, value in pairs)
        group = dataclasses.replace(self, samples=samples)
        if "columns" in vars(self):
            vars(group)["columns"] = self.columns._replace(advantages_GU=values_G[:, None])
        return group

    def with_turn_advantages(self, turns: Sequence[Sequence[float]]) -> "Group":
        """Returns the group with advantages for the turns of each response (`Response.turn_tokens`)."""
        samples = []
        for sample, values in zip(self.samples, turns, strict=True):
            mean = np.average(values, weights=sample.response.turn_tokens) if len(values) > 1 else values[0]
            samples.append(dataclasses.replace(sample, advantage=float(mean), turn_advantages=tuple(values)))
        return dataclasses.replace(self, samples=tuple(samples))


@dataclasses.dataclass(frozen=True)
class TrainedStep:
    """The groups of a training step, with advantages and in the order of draws, and the metrics of the step."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]


def without_rounding(values: Sequence[float]) -> list[float]:
    """Replaces values that differ only by rounding (even in float32) by the smallest of these values."""
    smallest, least = {}, math.nan
    for value in sorted(values):
        least = least if math.isclose(value, least, rel_tol=1e-6, abs_tol=1e-9) else value
        smallest[value] = least
    return [smallest[value] for value in values]


def differ(values: Sequence[float]) -> bool:
    """Says whether the values differ by more than rounding."""
    return len(set(without_rounding(values))) > 1


def has_variance(group: Group, of: str = "value") -> bool:
    """Says whether the group's rewards differ by more than rounding in the field `of` (`value` or `correct`). DAPO's
    dynamic sampling (arXiv:2503.14476, section 3.2) skips groups without variance, whose GRPO advantages are 0."""
    return differ([float(getattr(sample.reward, of)) for sample in group.samples])


@typing.no_type_check  # see `models.inputs.VisionInput`
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """One microbatch of packed rows with its training targets, all aligned with `inputs.tokens_BT`. The loss of a step
    is the sum over microbatches, rows and tokens of `loss_weights_BT * token_loss_BT`. The weights include all
    normalisation (by tokens, sequences, groups, a constant), so that packing and sharding do not change the loss."""

    inputs: PackedTokens
    loss_weights_BT: Float32[AnyArray, "B T"]  # 0 for tokens that are not trained on
    advantages_BT: Float32[AnyArray, "B T"]
    behaviour_logprobs_BT: Float32[AnyArray, "B T"]  # in nats, as the engine reported them
    reference_logprobs_BT: Float32[AnyArray, "B T"]  # in nats, of the frozen reference; 0 without a reference
    # The mean of log(trainer / engine) over the token's response, in nats, or 0 if the loss does not need this mean.
    response_log_ratios_BT: Float32[AnyArray, "B T"]
    # Versions (training steps) since the weights that generated the token, or -1 for prompts, given answers and
    # padding.
    lags_BT: Int32[AnyArray, "B T"]
    # Log-probs, in nats, of the policy as the training step begins, or None if the training step has one optimizer
    # step.
    proximal_logprobs_BT: Float32[AnyArray, "B T"] | None = None
    # The mean, over the token's response, of log(policy / behaviour), or of log(policy / proximal) if decoupled, in
    # nats. None if the loss does not read this mean.
    policy_log_ratios_BT: Float32[AnyArray, "B T"] | None = None
    # A critic's values before the step, and the returns that the critic learns, in the unit of rewards. None without a
    # critic.
    values_BT: Float32[AnyArray, "B T"] | None = None
    returns_BT: Float32[AnyArray, "B T"] | None = None
