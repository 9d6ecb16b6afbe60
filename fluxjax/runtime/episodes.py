"""Episodes in a run: which environment answers a response, and the tokens of its answers.

An episode begins when its first turn has ended. Environments of one prompt all begin with the same seed, so that a
group's episodes differ only in what the model says. The answer to a turn is kept until the next turn: a response that
is parked at the end of a turn, and goes on later, gets the same answer. If the environment of a response is gone, as
after a resume, an environment is begun anew and hears the recorded turns. It must answer them as before.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from models.inputs import ModelInput, joined
from models.processing.conversation import ObservationProcessor
from models.processing.media_file import MediaError, PromptError

from ..base.types import ENVIRONMENT, PreparedPrompt, Prompt, Response
from ..coordinator.messages import LENGTH
from ..environments import EnvironmentFailure, EnvironmentPool, Fault, LiveEpisode, Observed
from .conversations import inputs_of, request_seed

LayOut = Callable[[Sequence[int], Prompt], ModelInput]  # (ids with a placeholder a medium, media) -> inputs from 0 on


@dataclasses.dataclass(frozen=True)
class AnsweredTurn:
    """A response behind the observation of its last turn. `inputs` are its tokens' inputs
    (`PreparedPrompt.responses`). With `done`, the episode has ended."""

    response: Response
    inputs: ModelInput
    done: bool


@dataclasses.dataclass
class _Played:
    """An environment, the response's tokens up to the last turn that it heard, and its answer to this turn."""

    episode: LiveEpisode
    heard: tuple[int, ...]
    observed: Observed


@dataclasses.dataclass(eq=False)
class Episodes:
    """Answers the turns of responses. `lay_out` prepares the tokens and media of an observation. A response has at most
    `max_new_tokens` tokens: an episode whose next observation would leave no room for a turn ends. `seed` is the run's.
    """

    pool: EnvironmentPool
    observations: ObservationProcessor
    lay_out: LayOut
    max_new_tokens: int
    seed: int = 0
    arguments: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)  # by environment
    _live: dict[tuple[int, int], _Played] = dataclasses.field(default_factory=dict, init=False)  # by draw and sample

    async def act(self, prepared: PreparedPrompt, response: Response) -> AnsweredTurn:
        """Answers the last turn of a response. Raises EnvironmentFailure: also if an environment that was begun anew
        answers the recorded turns in another way."""
        inputs = inputs_of(prepared, response, self.merge_unit)
        played = await self._played(prepared.prompt, response)
        observed, turn_ids = played.observed, turns_of(response)[-1][0]
        rewards = (*response.rewards, observed.reward)
        if observed.done:
            await self.end(response.draw, response.sample)
            return AnsweredTurn(dataclasses.replace(response, rewards=rewards), inputs, True)
        observation = await self._tokenised(observed, prepared.prompt, turn_ids, inputs.next_position)
        count = len(observation)
        if response.num_tokens + count >= self.max_new_tokens:
            await self.end(response.draw, response.sample)
            return AnsweredTurn(dataclasses.replace(response, rewards=rewards, finish=LENGTH), inputs, True)
        longer = dataclasses.replace(
            response,
            token_ids=(*response.token_ids, *observation.token_ids_T.tolist()),
            logprobs=(*response.logprobs, *(0.0,) * count),
            versions=(*response.versions, *(ENVIRONMENT,) * count),
            media=(*response.media, *observed.media),
            rewards=rewards,
        )
        return AnsweredTurn(longer.packed(), joined([inputs, observation], self.merge_unit), False)

    async def end(self, draw: int, sample: int | None = None) -> None:
        """Ends the environments of a prompt, or of one of its samples."""
        keys = [key for key in self._live if key[0] == draw and sample in (None, key[1])]
        for played in [self._live.pop(key) for key in keys]:
            await played.episode.end()

    @property
    def merge_unit(self) -> int:
        """The number of patches that become one feature."""
        return self.observations.processor.layout.spatial_merge_size**2

    async def _played(self, prompt: Prompt, response: Response) -> _Played:
        """Returns the environment of a response, which has heard the response's last turn."""
        key, turns = (response.draw, response.sample), turns_of(response)
        played = self._live.get(key)
        said = response.token_ids[: len(response.token_ids) - len(turns[-1][0])]
        if played is not None and played.heard == response.token_ids:
            return played
        try:
            if played is None or played.heard != said[: len(played.heard)] or not self._is_next(played, turns):
                await self.end(*key)
                played = self._live[key] = await self._begun(prompt, response, turns[:-1])
            played.observed = await played.episode.act(self._text(turns[-1][0]))
        except EnvironmentFailure:
            self._live.pop(key, None)
            raise
        played.heard = response.token_ids
        return played

    @staticmethod
    def _is_next(played: _Played, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
        """Says whether the environment has heard all turns but the last."""
        return len(played.heard) == sum(len(said) + len(seen) for said, seen in turns[:-1]) - len(turns[-2][1])

    async def _begun(
        self, prompt: Prompt, response: Response, turns: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> _Played:
        """Begins an environment and lets it hear recorded turns, each a pair (turn, observation) of token ids."""
        arguments, seed = self.arguments.get(prompt.environment, {}), request_seed(self.seed, prompt.draw)
        episode = await self.pool.start(prompt.environment, prompt, seed, arguments)
        played = _Played(episode, (), episode.observation)
        for number, (said, seen) in enumerate(turns, 1):
            played.observed = await episode.act(self._text(said))
            again = await self._tokenised(played.observed, prompt, said, 0)
            if played.observed.done or again.token_ids_T.tolist() != list(seen):
                await episode.end()
                raise EnvironmentFailure(
                    Fault.INVALID,
                    f"{prompt.environment}: was begun anew, and answers turn {number} otherwise than before",
                )
        return played

    def _text(self, turn_ids: Sequence[int]) -> str:
        return self.observations.processor.decode(list(turn_ids))

    async def _tokenised(self, observed: Observed, prompt: Prompt, turn_ids: Sequence[int], start: int) -> ModelInput:
        """Returns the inputs of an observation whose first token has the rotary position `start`."""
        media = [(medium.kind.value, medium.path) for medium in observed.media]
        try:
            ids = self.observations.tokenise(observed.text, media, turn_ids=turn_ids)
            shown = dataclasses.replace(prompt, media=observed.media)
            inputs = await asyncio.to_thread(self.lay_out, ids, shown)
        except (PromptError, MediaError) as error:
            raise EnvironmentFailure(Fault.INVALID, f"{prompt.environment}: {error}") from None
        return dataclasses.replace(
            inputs, positions_3T=inputs.positions_3T + start, next_position=inputs.next_position + start
        )


def turns_of(response: Response) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
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
