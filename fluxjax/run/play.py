"""The environments of a run: they open prompts, answer the turns of episodes, and demonstrate turns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from models.inputs import ModelInput, PromptInput
from models.processing import MediaError, Processor, PromptError
from models.processing.conversation import ObservationProcessor

from ..base.medium import TURN
from ..base.types import PreparedPrompt, Prompt, Response, State
from ..config import Config, ConfigError
from ..environments import EnvironmentFailure, EnvironmentPool, Fault
from ..environments.opening import Openings
from ..runtime.episodes import Episodes

if TYPE_CHECKING:
    from ..data.shadows import ProxyMedia

_KEPT = 1 << 22  # tokens of demonstrated episodes, together, that are kept for later epochs
_ROLES = ("user", "tool")  # templates that strip earlier thinking behind a user's message keep it behind a tool's


@dataclasses.dataclass(eq=False)
class Play:
    """The way of a run to its environments. Media of observations become files in `folder` (None: a temporary folder).
    `note(environment, text)` is called for each failure. Raises ConfigError for an unusable chat template."""

    config: Config
    processor: Processor
    proxy: ProxyMedia | None
    folder: pathlib.Path | None
    note: Callable[[str, str], None]
    episodes: Episodes | None = dataclasses.field(default=None, init=False)  # while the block of `begun` runs
    snapshots: State = dataclasses.field(default_factory=dict, init=False)  # of a checkpoint, with which `begun` begins

    def __post_init__(self) -> None:
        self._demonstrations, self._kept = dict[tuple[str, str, str], tuple[Response, Mapping[int, PromptInput]]](), 0
        self._open = contextlib.ExitStack()
        temporary = functools.partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
        self._folder = self.folder or pathlib.Path(self._open.enter_context(temporary()))
        self._observations = observations_of(self.config, self.processor)
        self.opened = Openings(self.config.data, self._folder, self.processor, self.config.seed, self.note)

    @contextlib.asynccontextmanager
    async def begun(self) -> AsyncIterator[Episodes]:
        """Offers episodes, in the present event loop, until the block ends."""
        data, rollout = self.config.data, self.config.rollout
        pool = EnvironmentPool(self._folder, data.environments, note=self.note)
        arguments = {name: source.environment_arguments for name, source in data.sources.items()}
        most, seed = rollout.max_new_tokens, self.config.seed
        self.episodes = Episodes(pool, self._observations, self._lay_out, most, seed, arguments)
        self.episodes.load_state_dict(self.snapshots)
        try:
            yield self.episodes
        finally:
            self.episodes = None
            await pool.close()

    def restored(self, prepared: PreparedPrompt, saved: State) -> PreparedPrompt:
        """Returns the prompt with the inputs of the responses that a checkpoint has of it. If the environment begins
        otherwise than before, or media of observations are gone, this is noted, and `saved` is marked to begin anew."""
        prompt, responses = prepared.prompt, [*saved["responses"], *saved.get("begun", [])]
        if not prompt.environment or not responses:
            return prepared
        for medium in itertools.chain.from_iterable(response.get("media", ()) for response in responses):
            medium["path"] = str(self._folder / pathlib.PurePath(medium["path"]).name)  # the run may have moved
        start, proxy, inputs = prepared.inputs.laid_out().next_position, self.proxy, dict[int, ModelInput]()
        try:
            if saved.get("shown", prompt.shown) != prompt.shown:
                raise ValueError("begins otherwise than before the checkpoint")
            for response in map(Response.from_json, responses):
                if response.media and proxy is not None:
                    inputs[response.sample] = proxy.response_inputs(self.processor, response, start)
        except (MediaError, ValueError) as error:
            self.note(prompt.environment, f"source {prompt.source}: {error}; its episodes begin anew")
            saved["shown"] = None
            return prepared
        return dataclasses.replace(prepared, responses=inputs)

    def state_dict(self) -> State:
        """Returns the snapshots of environments, for a checkpoint."""
        return {} if self.episodes is None else self.episodes.state_dict()

    def metrics(self) -> dict[str, float]:
        return {} if self.episodes is None else self.episodes.pool.metrics()

    async def demonstrated(self, prepared: PreparedPrompt, tries: int = 2) -> tuple[PreparedPrompt, Response] | str:
        """Returns an episode whose turns its environment demonstrates, or why there is none. A record that comes again
        has the same episode, as long as `_KEPT` tokens hold all. If the environment's process is killed, the episode is
        begun anew. Raises ConfigError if the environment can't demonstrate turns."""
        assert self.episodes is not None
        prompt = prepared.prompt
        key = prompt.source, prompt.id, prompt.shown
        if key in self._demonstrations:
            response, responses = self._demonstrations[key]
            response = dataclasses.replace(response, rid=f"sft-{prompt.draw}/0", draw=prompt.draw).packed()
            return dataclasses.replace(prepared, responses=responses), response
        try:
            prepared, response = await self.episodes.demonstrated(prepared)
        except EnvironmentFailure as failure:
            if tries > 1 and failure.fault is Fault.DIED:
                return await self.demonstrated(prepared, tries - 1)
            return f"{prompt.environment} failed ({failure.fault.value})"
        if self._kept + response.num_tokens <= _KEPT:
            self._kept += response.num_tokens
            self._demonstrations[key] = response, prepared.responses
        return prepared, response

    def _lay_out(self, ids: Sequence[int], prompt: Prompt) -> ModelInput:
        if self.proxy is None:
            return self.processor.prepare_ids(ids)
        return self.proxy.inputs(self.processor, ids, prompt).laid_out()

    def close(self) -> None:
        self.opened.close()
        self._open.close()


def observations_of(config: Config, processor: Processor) -> ObservationProcessor:
    """Returns the way in which observations follow turns. Raises ConfigError if the chat template has none. A template
    that writes earlier turns anew suits contexts without earlier turns."""
    if not config.data.chat_template:
        return ObservationProcessor(processor)
    reasons, suiting = [], list[ObservationProcessor]()
    contexts = {source.context for source in config.data.sources.values() if source.environment}
    for role in _ROLES:
        try:
            found = ObservationProcessor.of(processor, role)
        except PromptError as error:
            reasons.append(f"by the role {role}: {error}")
        else:
            if found.prefix_stable:
                return found
            suiting += [found] * (found.one_turn and contexts == {TURN})
            reasons.append(f"by the role {role}: {found.instability}")
    if suiting:
        return suiting[0]
    raise ConfigError("data.chat_template: observations of environments can't be shown; " + "; ".join(reasons))
