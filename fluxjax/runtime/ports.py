"""The runtime's collaborators, a small protocol for each, and the base class of observers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..base.types import Group, PreparedPrompt, Prompt, Response, State, TrainedStep

if TYPE_CHECKING:
    from .episodes import AnsweredTurn


class EvaluationGivenUp(Exception):
    """The run is to stop before its evaluation is complete; the resumed run evaluates again."""


@runtime_checkable
class Trainer(Protocol):
    """Trains for the runtime. `accumulate`, `train` and `weights` block; a thread calls them, one at a time."""

    @property
    def version(self) -> int:
        """The version of the weights that the trainer holds now; it grows with every `train`."""
        ...

    def train(self, step: int, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt]) -> TrainedStep:
        """Makes a training step over these groups and the groups that `accumulate` got; `prepared` has each group's
        prompt, by draw. Returns all groups of the step, ordered by draw, and metrics."""
        ...

    def accumulate(
        self, step: int, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt], engines: Sequence[int] = ()
    ) -> None:
        """Computes gradients of some groups of the step that `train` will end. Uses the devices of these engines, which
        sleep meanwhile; if `engines` is empty, uses the trainer's devices. Changes no weights."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """Returns the parameters of `version` as engines take them; the parameters must outlive the next `train`."""
        ...


@runtime_checkable
class Environments(Protocol):
    """Answers the turns of responses: see `episodes.Episodes`."""

    @property
    def merge_unit(self) -> int:
        """The number of patches that become one feature."""
        ...

    @property
    def at_once(self) -> int:
        """The number of environments that may live at the same time."""
        ...

    async def act(self, prepared: PreparedPrompt, response: Response) -> AnsweredTurn:
        """Answers the last turn of a response. Raises EnvironmentFailure."""
        ...

    async def end(self, draw: int, sample: int | None = None) -> None:
        """Ends the environments of a prompt, or of one of its samples."""
        ...

    async def park(self, draw: int, sample: int | None = None) -> None:
        """Ends these environments, too, but keeps answers, since the responses go on later."""
        ...


@runtime_checkable
class Checkpointer(Protocol):
    def state(self) -> State:
        """Returns the state of coordinator, prompts and rewards, all as the last step left them."""
        ...

    def save(self, step: int, state: State) -> None:
        """Saves a checkpoint, in the trainer's thread, as nothing may be trained meanwhile. Writing may end later."""
        ...


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A step that is trained and published. `groups` are ordered by draw and have advantages; `seconds` is the wall
    time of each stage of the step."""

    step: int
    version: int
    groups: tuple[Group, ...]
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]


class Observer:
    """Hears what happens in a run: override the methods that you need. The methods run on the event loop between
    instructions: keep them short. An exception in a method ends the run."""

    def on_step(self, report: StepReport) -> None: ...

    def on_evaluation(self, step: int, full: bool, result: Mapping[str, float]) -> None: ...

    def on_checkpoint(self, step: int) -> None: ...

    def on_skip(self, prompt: Prompt, reason: str) -> None: ...
