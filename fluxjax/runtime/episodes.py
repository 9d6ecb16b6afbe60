"""Episodes in a run: which environment answers a response, and the tokens of its answers.

An episode begins when its first turn has ended. Environments of one prompt all begin with the same seed, so that a
group's episodes differ only in what the model says. The answer to a turn is kept until the next turn: a response that
is parked at the end of a turn, and goes on later, gets the same answer. If the environment of a response is gone, as
after a resume or while the response is parked, an environment is begun anew. It gets the snapshot of the one before, if
that had snapshots, or else hears the recorded turns, which it must answer as before.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from models.inputs import ModelInput, joined
from models.processing.conversation import ObservationProcessor
from models.processing.media_file import MediaError, PromptError

from ..base.errors import ConfigError
from ..base.scored import Turns, request_seed, turns_of
from ..base.types import ENVIRONMENT, PreparedPrompt, Prompt, Response, SavedState, State
from ..batch.composer import given_response
from ..coordinator.messages import LENGTH
from ..environments import EnvironmentFailure, EnvironmentPool, Fault, LiveEpisode, Observed
from .conversations import inputs_of

_SAVED = 1 << 16  # bytes of a snapshot, at most, that a checkpoint keeps
LayOut = Callable[[Sequence[int], Prompt], ModelInput]  # (ids with a placeholder a medium, media) -> inputs from 0 on


@dataclasses.dataclass(frozen=True)
class AnsweredTurn:
    """A response behind the observation of its last turn. `inputs` are its tokens' inputs
    (`PreparedPrompt.responses`). With `done`, the episode has ended."""

    response: Response
    inputs: ModelInput
    done: bool


@dataclasses.dataclass(eq=False)
class _Seat:
    """The environment of a response, the response's tokens up to the last turn that it heard, and its answer to this
    turn. `busy` is held while the environment begins or hears a turn."""

    busy: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    episode: LiveEpisode | None = None
    heard: tuple[int, ...] = ()
    answer: Observed | None = None
    snapshot: tuple[tuple[int, ...], bytes] | None = None  # of an environment that was parked, with what it had heard
    ended: bool = False  # nobody waits for further answers
    parked: bool = False  # the response waits for other weights, and holds no environment meanwhile


@dataclasses.dataclass(eq=False)
class Episodes:
    """Answers the turns of responses. `lay_out` prepares the tokens and media of an observation. A response has at most
    `max_new_tokens` tokens, and as many turns as the pool's limits say: an episode whose next observation would leave
    no room for a turn ends. `seed` is the run's."""

    pool: EnvironmentPool
    observations: ObservationProcessor
    lay_out: LayOut
    max_new_tokens: int
    seed: int = 0
    arguments: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)  # by source
    _seats: dict[tuple[int, int], _Seat] = dataclasses.field(default_factory=dict, init=False)  # by draw and sample

    async def act(self, prepared: PreparedPrompt, response: Response, tries: int = 2) -> AnsweredTurn:
        """Answers the last turn of a response. If the environment's process is killed, another one is begun, `tries` in
        all. Raises EnvironmentFailure: also if an environment that was begun anew answers the recorded turns in another
        way."""
        inputs, turns = inputs_of(prepared, response, self.merge_unit), turns_of(response)
        observed = await self._answer(prepared.prompt, response, tries)
        rewards = (*response.rewards, observed.reward)
        if observed.done:
            await self.end(response.draw, response.sample)
            return AnsweredTurn(dataclasses.replace(response, rewards=rewards), inputs, True)
        observation = await self._tokenised(observed, prepared.prompt, turns[-1][0], inputs.next_position)
        count = len(observation)
        if len(turns) == self.pool.limits.turns or response.num_tokens + count >= self.max_new_tokens:
            await self.end(response.draw, response.sample)
            return AnsweredTurn(dataclasses.replace(response, rewards=rewards, finish=LENGTH), inputs, True)
        longer = dataclasses.replace(
            response,
            token_ids=(*response.token_ids, *observation.token_ids_T.tolist()),
            logprobs=(*response.logprobs, *(0.0,) * count),
            versions=(*response.versions, *(ENVIRONMENT,) * count),
            media=(*response.media, *observed.media),
            rewards=rewards,
            media_counts=(*response.media_counts, len(observed.media)),
        )
        return AnsweredTurn(longer.packed(), joined([inputs, observation], self.merge_unit), False)

    async def end(self, draw: int, sample: int | None = None) -> None:
        """Ends the environments of a prompt, or of one of its samples. One that is busy is killed, and its `act` raises
        EnvironmentFailure."""
        keys = [key for key in self._seats if key[0] == draw and sample in (None, key[1])]
        for seat in [self._seats.pop(key) for key in keys]:
            seat.ended = True
            if seat.episode is not None:
                await (seat.episode.kill() if seat.busy.locked() else seat.episode.end())

    async def park(self, draw: int, sample: int | None = None) -> None:
        """Ends the environments of parked responses, which others may wait for. An answer under way is kept."""
        for seat in [seat for key, seat in self._seats.items() if key[0] == draw and sample in (None, key[1])]:
            seat.parked = True
            if not seat.busy.locked():
                await self._leave(seat, keep=True)

    async def demonstrated(self, prepared: PreparedPrompt) -> tuple[PreparedPrompt, Response]:
        """Plays an episode in which `Environment.demonstrate` says what the model says. Returns the prompt with the
        response's inputs, and the response. Raises EnvironmentFailure; ConfigError without demonstrations."""
        prompt, processor = prepared.prompt, self.observations.processor
        response = given_response(prompt.draw, [])
        try:
            while True:
                ids = [*processor.encode(await self._demonstration(prompt, response)), processor.eos_ids[0]]
                said = given_response(prompt.draw, ids)
                response = dataclasses.replace(
                    response,
                    token_ids=response.token_ids + said.token_ids,
                    logprobs=response.logprobs + said.logprobs,
                    versions=response.versions + said.versions,
                )
                if response.num_tokens > self.max_new_tokens:
                    raise EnvironmentFailure(Fault.TOO_LARGE, f"a demonstration has over {self.max_new_tokens} tokens")
                answer = await self.act(prepared, response, 1)  # demonstrations may have chances of their own
                response, prepared = answer.response, dataclasses.replace(prepared, responses={0: answer.inputs})
                if answer.done:
                    return prepared, response
        except PromptError as error:
            raise EnvironmentFailure(Fault.INVALID, f"a demonstration can't be written: {error}") from None
        finally:
            await self.end(prompt.draw)

    @property
    def merge_unit(self) -> int:
        """The number of patches that become one feature."""
        return self.observations.processor.layout.spatial_merge_size**2

    @property
    def at_once(self) -> int:
        return self.pool.limits.concurrency

    async def _answer(self, prompt: Prompt, response: Response, tries: int) -> Observed:
        """Returns the answer to the response's last turn, which the environment hears once."""
        turns = turns_of(response)
        async with self._seat(prompt, response) as seat:
            seat.parked = False
            if seat.answer is not None and seat.heard == response.token_ids:
                return seat.answer
            for left in reversed(range(tries)):
                try:
                    if seat.episode is None or seat.heard != _heard(response, turns):
                        await self._leave(seat)
                        seat.episode = await self._begun(prompt, seat, response, turns)
                    seat.answer = await seat.episode.act(self._text(turns[-1][0]))
                    break
                except EnvironmentFailure as failure:
                    seat.episode = None
                    if not left or seat.ended or failure.fault is not Fault.DIED:
                        raise
            assert seat.answer is not None
            seat.heard = response.token_ids
            if seat.parked:
                await self._leave(seat, keep=True)
            return seat.answer

    async def _demonstration(self, prompt: Prompt, response: Response) -> str:
        async with self._seat(prompt, response) as seat:
            seat.episode = seat.episode or await self._begun(prompt, seat, response, [])
            return await seat.episode.demonstrate()

    @contextlib.asynccontextmanager
    async def _seat(self, prompt: Prompt, response: Response) -> AsyncIterator[_Seat]:
        """Holds the seat of a response, which is lost if its environment fails. A response that is parked and goes on
        may ask while its turn is being answered."""
        key = response.draw, response.sample
        seat = self._seats.setdefault(key, _Seat())
        async with seat.busy:
            try:
                yield seat
            except EnvironmentFailure:
                if self._seats.get(key) is seat:
                    del self._seats[key]
                raise
            except ConfigError as error:
                raise ConfigError(f"data.sources.{prompt.source}: {error}") from None

    @staticmethod
    async def _leave(seat: _Seat, keep: bool = False) -> None:
        """Ends a seat's environment, and keeps its snapshot if it has one."""
        heard, episode, seat.episode = seat.heard, seat.episode, None
        if episode is None:
            return
        if keep and not episode.observation.done:
            with contextlib.suppress(EnvironmentFailure):  # it is counted, and the recorded turns do as well
                seat.snapshot = (heard, taken) if (taken := await episode.snapshot()) is not None else None
        await episode.end()

    def state_dict(self) -> State:
        """Returns the snapshots of parked environments, except large ones, as JSON values."""
        taken = [(*key, *seat.snapshot) for key, seat in self._seats.items() if seat.snapshot is not None]
        small = [(*named, base64.b64encode(state).decode()) for *named, state in taken if len(state) <= _SAVED]
        return {"snapshots": small}

    def load_state_dict(self, state: SavedState) -> None:
        """Takes over the snapshots of a checkpoint."""
        for draw, sample, heard, snapshot in state.get("snapshots", ()):
            self._seats[draw, sample] = _Seat(snapshot=(tuple(heard), base64.b64decode(snapshot)))

    async def _begun(self, prompt: Prompt, seat: _Seat, response: Response, turns: Turns) -> LiveEpisode:
        """Begins an environment and sets it to the state before the last turn: by the snapshot of this state, or by the
        recorded turns, each with the observation that followed."""
        arguments, seed = self.arguments.get(prompt.source, {}), request_seed(self.seed, prompt.draw)
        episode = await self.pool.start(prompt.environment, prompt.record, seed, arguments)
        try:
            shown = prompt.record.opened(episode.observation.text, episode.observation.media)
            if (shown.text, shown.media) != (prompt.text, prompt.media) or episode.observation.done:
                raise self._otherwise(prompt, "begins")
            recorded = list(zip(turns[:-1], response.observed_media, strict=True))
            if seat.snapshot is not None and seat.snapshot[0] == _heard(response, turns) and episode.has_snapshots:
                await episode.restore(seat.snapshot[1])
                recorded = []
            for number, ((said, seen), media) in enumerate(recorded, 1):
                answer = await episode.act(self._text(said))
                again = await self._tokenised(answer, prompt, said, 0)
                if answer.done or answer.media != media or again.token_ids_T.tolist() != list(seen):
                    raise self._otherwise(prompt, f"answers turn {number}")
            if seat.ended:
                raise EnvironmentFailure(Fault.DIED, f"{prompt.environment}: was ended while it began")
        except BaseException:
            await episode.end()
            raise
        return episode

    def _otherwise(self, prompt: Prompt, does: str) -> EnvironmentFailure:
        reason = f"{prompt.environment} of source {prompt.source} was begun anew, and {does} otherwise than before"
        return self.pool.failed(prompt.environment, EnvironmentFailure(Fault.INVALID, reason))

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


def _heard(response: Response, turns: Turns) -> tuple[int, ...] | None:
    """Returns the response's tokens up to the last turn but one; None if there is only one turn."""
    if len(turns) < 2:
        return None
    return response.token_ids[: response.num_tokens - len(turns[-1][0]) - len(turns[-2][1])]
