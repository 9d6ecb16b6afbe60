"""Turns scored groups into the microbatches of a step.

`Composer` decides which responses are trained on, and with which loss weights. Its dealer for `sharding.strategy`
(`rows`, `spreading` or `own_pace`) decides which devices compute which responses. `fill` writes the arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from jax.sharding import Mesh

from models.config import TextConfig, VisionConfig
from models.inputs import PromptInput, media_numbers, picked, text_input
from sharding.kernels.runs import chunk_size
from sharding.spread.shapes import ShapeBook

from ..algorithms.loss import response_weights
from ..base.medium import WHOLE
from ..base.process import collector_paused
from ..base.scored import ENVIRONMENT, bytes_of, numbers_of, turn_numbers, views_of
from ..base.types import Columns, Group, PreparedPrompt, Prompt, Response, Reward, Sample, TrainBatch
from ..config import FSDP, ODC, Config, ConfigError, Strategy
from .composition import Composition
from .fill import lay_out
from .part import Room
from .rows import RowPacking
from .share import Share, TrainGroup

if TYPE_CHECKING:
    from sharding.links import Links
    from sharding.walk import Params

    from ..base.statuses import HostStatus
    from .own_pace import OwnPace
    from .spreading import Spreading

T = TypeVar("T")
Minibatch: TypeAlias = tuple[Sequence[Group], Mapping[int, PreparedPrompt]]  # groups, and their prompts by draw


class Composer:
    """Packs all responses of a step for `num_devices` devices.

    `vision` and `text` are the model's sizes. `vision` is None for a text model, whose batches have no vision buffer.
    `text` bounds the number of devices of a sequence (None: no bound). `shapes` remembers the buffer sizes of earlier
    microbatches, and is part of a run's state.

    Raises ConfigError for a `packing` that can hold nothing, for a degree that `num_devices` does not allow, and for an
    unreadable calibration.
    """

    def __init__(
        self,
        config: Config,
        num_devices: int = 1,
        vision: VisionConfig | None = None,
        text: TextConfig | None = None,
        shapes: ShapeBook | None = None,
    ) -> None:
        self._config, self._vision, self._text, self.num_devices = config, vision, text, num_devices
        self.shapes = shape_book(config) if shapes is None else shapes
        packing, self._tempered = config.packing, config.rollout.tempered
        tokens = packing.tokens_per_row * packing.rows_per_device
        chunk = chunk_size(packing.tokens_per_row) if text is not None and text.delta is not None else 0
        self.room = Room(tokens, packing.patches_per_device, packing.share_prompts, vision, chunk=chunk)
        self._dealer = self._dealer_for(config.sharding.strategy, num_devices)

    def _dealer_for(self, strategy: Strategy, num_devices: int) -> RowPacking | Spreading | OwnPace:
        if isinstance(strategy, FSDP):
            return RowPacking(self._config, num_devices, self._vision, self.shapes, self.room.chunk)
        if isinstance(strategy, ODC):
            from .own_pace import OwnPace as Dealer
        else:
            from .spreading import Spreading as Dealer
        return Dealer(self._config, num_devices, self.room, self._text, self.shapes)

    def on(self, num_devices: int) -> Composer:
        """Returns the same composer for another number of devices."""
        return Composer(self._config, num_devices, self._vision, self._text, self.shapes)

    @property
    def num_shapes(self) -> int:
        """The number of compiled shapes of microbatches."""
        return len(self.shapes)

    def check(self) -> None:
        """Raises ConfigError for rollouts that are longer than the devices of one sequence can hold. Does nothing under
        `fsdp`, for which `Config.validate` compares the lengths."""
        if isinstance(self._dealer, RowPacking):
            return
        degree, longest = self._dealer.degree, self._config.rollout.max_sequence_tokens
        held = degree * self.room.tokens
        if longest > held:
            raise ConfigError(
                f"rollout.max_sequence_tokens is {longest}, but the {degree} devices of a sequence hold {held} tokens "
                "(packing.tokens_per_row * packing.rows_per_device each)"
            )

    def compose(self, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt], **options: Any) -> Composition:
        """Returns the microbatches with the rows of all shards. Arguments are those of `outline`."""
        return self.lay_out(self.outline(groups, prepared, **options))

    def outline(
        self,
        groups: Sequence[Group],
        prepared: Mapping[int, PreparedPrompt],
        *,
        skip_idle: bool = False,
        version: int | None = None,
    ) -> Share:
        """Plans the microbatches of all shards, and remembers the sizes of their buffers. Reads no token and no pixel
        of a prompt.

        `prepared` maps the draw of each group to its prompt. Groups are laid out in the order of draws, and responses
        in the order of samples.

        `skip_idle` leaves out groups whose advantages are all zero, and whose gradient is therefore zero without a KL
        term. Loss weights still count these groups. If all advantages of all groups are zero, the first group stays.

        `version` is the version of the weights to be trained; None means the newest version among the tokens. A token's
        lag is its distance from this version.

        Raises ConfigError, naming prompt and field, for a sequence or media that fit no buffer. Raises ValueError for a
        draw that two groups have or that `prepared` lacks, for an empty prompt, and for tokens newer than `version`.
        """
        self.shapes.next_step()
        to_train, version = self._chosen(groups, prepared, skip_idle, version)
        micros, to_train = self._dealer.outline(to_train)
        return Share.of_all(micros, to_train, self.num_devices, version)

    def lay_out(self, share: Share) -> Composition:
        """Returns the microbatches of a share, with only the rows of the share's shards."""
        return lay_out(share, self.room, self._tempered)

    def _chosen(
        self, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt], skip_idle: bool, version: int | None
    ) -> tuple[Sequence[TrainGroup], int]:
        config = self._config
        ordered = sorted(groups, key=attrgetter("prompt.draw"))
        for group, following in pairwise(ordered):
            if group.prompt.draw == following.prompt.draw:
                ids = f"{group.prompt.id} and {following.prompt.id}"
                raise ValueError(f"prompts {ids} have the same draw {group.prompt.draw}")
        ordered, numbers_R4 = _by_number(ordered)
        lengths = numbers_R4[:, 3]  # tokens that are trained on
        weights = response_weights(lengths, config.algorithm.loss_aggregation, config.rollout.max_new_tokens)
        weights = weights.astype(np.float64)
        newest = int(numbers_R4[:, 2].max(initial=-1))
        version = newest if version is None else version
        if newest > version:
            raise ValueError(
                f"a token was generated by version {newest} of the weights, which is newer than version {version}, "
                "the version to be trained"
            )

        to_train: list[TrainGroup] = []
        end, silent = 0, not lengths.all()
        for group in ordered:
            columns, span = group.columns, slice(end, end + len(group.samples))
            end, weighed = span.stop, weights[span]
            if silent and not lengths[span].all():
                columns = Columns.of([sample for sample in group.samples if sample.response.num_trained])
                weighed = weighed[lengths[span] > 0]
            if columns.data:
                inputs = self._inputs(group.prompt, prepared)
                observed = _observed(columns, prepared[group.prompt.draw])
                chosen = TrainGroup(group.prompt.id, inputs, columns, weighed, observed)
                if group.prompt.context != WHOLE:
                    unit = 1 if self._vision is None else self._vision.merge_unit
                    chosen = _in_views(chosen, group.prompt.context, unit)
                to_train.append(chosen)
        if skip_idle:
            taught = [group for group in to_train if group.columns.advantages_GU.any()]
            to_train = taught or to_train[:1]
        return to_train, version

    def _inputs(self, prompt: Prompt, prepared: Mapping[int, PreparedPrompt]) -> PromptInput:
        if prompt.draw not in prepared:
            raise ValueError(f"prompt {prompt.id}, draw {prompt.draw}, is not among the prepared prompts")
        inputs = prepared[prompt.draw].inputs
        if len(inputs) == 0:
            raise ValueError(f"prompt {prompt.id} has no tokens; the first token of a response needs a token before it")
        shown = (inputs, *prepared[prompt.draw].responses.values())
        if self._vision is None and any(part.patches_PX is not None for part in shown):
            raise ValueError(f"prompt {prompt.id} has media, but the model has no vision tower")
        return inputs


class Team:
    """This process's view of the processes that train together. A `Team` has a single process, a `hosts.gang.Gang`
    several. Only process 0 calls `composed`, `hand_out`, `tell` and `whole`. The other processes call `laid_out` with
    their shares from process 0. All processes call the remaining methods in the same order."""

    process, processes = 0, 1
    links: Links | None = None  # links to the other processes
    rank_here = 0  # number of lower-numbered processes on this process's host, whose ports they share
    bytes_told = 0  # bytes sent by this process to all others
    _expect: Callable[[Iterable[TrainBatch]], None] | None = None

    @property
    def alone(self) -> bool:
        return self.processes == 1

    def equip(
        self, config: Config, place_of: Callable[[str], str], expect: Callable[[Iterable[TrainBatch]], None] | None
    ) -> None:
        """Sets what `laid_out` needs from a run with the configuration `config`. `place_of` returns the preprocessor
        that holds a ticket's medium. `expect` gets the batches that this process will read (None: without pixels)."""
        self._expect = expect

    def composed(
        self,
        composer: Composer,
        minibatches: Sequence[Minibatch],
        *,
        size: int = 0,
        update: bool = True,
        **options: Any,
    ) -> list[Composition]:
        """Returns the microbatches of process 0's share of each minibatch. `options` are those of `Composer.outline`.
        The other processes get their shares, with `size` and `update` (see `PolicyTrainer.follow`). After an error the
        team can't be used any more."""
        with collector_paused():
            with self.stage("plan"):
                steps = [composer.outline(groups, prepared, **options) for groups, prepared in minibatches]
                cut = [step.cut(self.processes) if self.processes > 1 else [step] for step in steps]
                self.hand_out([[shares[process] for shares in cut] for process in range(self.processes)], size, update)
            return self.laid_out(composer, [shares[0] for shares in cut])

    def laid_out(self, composer: Composer, shares: Sequence[Share]) -> list[Composition]:
        """Returns the microbatches of this process's shares, after `agree`."""
        with self.stage("layout"):
            compositions = [composer.lay_out(share) for share in shares]
        if self._expect is not None:
            self._expect(micro.batch for composition in compositions for micro in composition.microbatches)
        self.agree(compositions)
        return compositions

    def stage(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measures a stage of the step."""
        return contextlib.nullcontext()

    def hand_out(self, shares: Sequence[Sequence[Share]], size: int = 0, update: bool = True) -> None:
        """Orders every other process to learn from `shares[process]`, its shares of the minibatches of a step. Without
        `update`, the minibatches are a portion of a step."""

    def agree(self, compositions: Sequence[Composition]) -> None:
        """Compares, among all processes, the settings and the array shapes that decide the next programs. Raises
        LinkError in all processes if a process differs."""

    def decided(self, value: Any, decide: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Calls `decide` in process 0 with the values of all processes. Returns this process's element of the result.
        Values are numbers, texts, arrays of one dimension, and lists and dictionaries of these."""
        return decide([value])[0]

    def exchange(self, value: T) -> list[T]:
        """Returns, in every process, the list of all processes' values (see `decided`)."""
        return self.decided(value, lambda every: [every] * len(every))

    def tell(self, order: Any) -> None:
        """Sends all other processes a `hosts.orders.Order`. Raises LinkError if a process has failed."""

    def whole(self, make: Callable[[], Params], mesh: Mesh, *, adapters: bool = False) -> Params:
        """Returns the weights of `make` as complete arrays in the memory of process 0. Orders the others to take part.
        With `adapters`, these are the adapters' weights. A process that is alone gets the result of `make`."""
        return make()

    def stepped(self, idle: float | None = None) -> None:
        """Notes that this process has finished the step that was handed out last. A second call for the same step does
        nothing. `idle` is the field of `HostStatus`. Raises LinkError if a process has failed."""

    def statuses(self) -> list[HostStatus]:
        """Returns the newest statuses: of all processes in process 0, else of this one; none if it is alone."""
        return []

    def close(self) -> None:
        """Stops looking whether other processes make progress."""


MAX_SHAPES = 32  # limit of compiled shapes of microbatches, for each number of devices


def shape_book(config: Config) -> ShapeBook:
    """Returns an empty shape book. Under `odc`, seven eighths of the shapes are for programs of single devices."""
    alone = max(MAX_SHAPES * 7 // 8, 1) if isinstance(config.sharding.strategy, ODC) else 0
    return ShapeBook(MAX_SHAPES, alone=alone, ahead=config.sharding.compile_ahead)


def _by_number(groups: Sequence[Group]) -> tuple[Sequence[Group], np.ndarray]:
    """Returns the groups with samples in order, and the concatenated `Columns.numbers_G4` of the groups, `[R, 4]`."""
    numbers = [group.columns.numbers_G4 for group in groups]
    numbers_R4 = np.concatenate([np.zeros((0, 4), np.int64), *numbers])
    begins = np.cumsum([0, *map(len, numbers)])[:-1]
    falls = np.flatnonzero(np.diff(numbers_R4[:, 0]) < 0) + 1
    if np.isin(falls, begins).all():
        return groups, numbers_R4
    ordered = (tuple(sorted(group.samples, key=lambda sample: sample.response.sample)) for group in groups)
    return _by_number([dataclasses.replace(g, samples=samples) for g, samples in zip(groups, ordered, strict=True)])


def _observed(columns: Columns, prompt: PreparedPrompt) -> Mapping[int, PromptInput]:
    """Returns the inputs of responses that observed media, by index. Raises ValueError for inputs of another length."""
    observed: dict[int, PromptInput] = {}
    numbers: list[list[int]] = columns.numbers_G4.tolist() if prompt.responses else []
    for k, (sample, length, *_) in enumerate(numbers):
        if (inputs := prompt.responses.get(sample)) is None:
            continue
        if len(inputs) != length:
            raise ValueError(
                f"prompt {prompt.prompt.id}: response {k} has {length} tokens, but its inputs have {len(inputs)}"
            )
        observed[k] = inputs
    return observed


def _in_views(group: TrainGroup, context: str, merge_unit: int) -> TrainGroup:
    """Returns the group with views (`views_of`) in the place of its responses. A view's history has no loss, as tokens
    of the environment. Its own tokens keep their loss weights, so that an episode weighs as if it had one view."""
    draw, _, advantages_GU, data_G = group.columns
    start = group.inputs.laid_out().next_position
    parent: list[int] = []
    rows, advantages, data, observed = [], [], list[bytes](), dict[int, PromptInput]()
    for k, (sample, temperature, tokens_T, logprobs_T, versions_T) in enumerate(map(numbers_of, data_G)):
        inputs = group.observed[k].laid_out() if k in group.observed else text_input(tokens_T, start)
        turn_T = turn_numbers(versions_T)
        for kept, first in views_of(versions_T, media_numbers(inputs), context):
            versions = np.where(kept < first, ENVIRONMENT, versions_T[kept])
            trained = versions != ENVIRONMENT
            if not trained.any():  # the episode ended with an observation
                continue
            view = picked(inputs, kept, start, merge_unit)
            if view.vision is not None:
                observed[len(data)] = view
            of_turns = advantages_GU[k].copy()
            if len(of_turns) > 1:
                of_turns[turn_numbers(versions)[trained]] = advantages_GU[k, turn_T[kept][trained]]
            logprobs = np.where(trained, logprobs_T[kept], np.float32(0))
            columns = (values.tolist() for values in (tokens_T[kept], logprobs, versions))
            data.append(bytes_of(sample, temperature, *columns))
            rows.append((sample, len(kept), int(versions.max()), int(trained.sum())))
            advantages.append(of_turns)
            parent.append(k)
    columns = Columns(draw, np.array(rows, np.int64), np.array(advantages), tuple(data))
    return group._replace(columns=columns, weights=group.weights[parent], observed=observed)


def given_response(draw: int, ids: Sequence[int]) -> Response:
    """Returns a response of given tokens. Log-probs are 0 and versions -1, because no engine produced the tokens."""
    zeros, token_ids = (0.0,) * len(ids), tuple(int(token) for token in ids)
    return Response(f"sft-{draw}/0", draw, 0, token_ids, zeros, (-1,) * len(ids), "stop", temperature=1.0)


def sft_groups(prompts: Sequence[PreparedPrompt], answers: Sequence[Sequence[int] | Response]) -> list[Group]:
    """Returns a group for each prompt, with the given answer alone: token ids with the stop id, or a response."""
    groups = []
    for prepared, answer in zip(prompts, answers, strict=True):
        response = answer if isinstance(answer, Response) else given_response(prepared.prompt.draw, answer)
        groups.append(Group(prepared.prompt, (Sample(response, Reward(1.0, True, "given answer"), advantage=1.0),)))
    return groups
