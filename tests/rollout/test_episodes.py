"""Runs of episodes with images in several turns: the real coordinator, engine, processor, and environments in
processes. Everything that is trained on is what was sampled and observed, token for token."""

import asyncio
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from painter import PICTURES
from protocol_cases import model, processor
from runtime_cases import Run, Source, Trainer, limited
from turns import by_turns

import models
from fluxjax.base.types import ENVIRONMENT, Group, PreparedPrompt, Prompt, Response, TrainedStep
from fluxjax.batch.composer import Composer
from fluxjax.batch.composition import unpack
from fluxjax.config import Config
from fluxjax.coordinator.policies.april import April
from fluxjax.data.tickets import source_of
from fluxjax.environments import EnvironmentFailure, EnvironmentLimits, EnvironmentPool, Fault
from fluxjax.runtime.episodes import Episodes, turns_of
from models.decoder import logprobs
from models.inputs import ModelInput
from models.processing.conversation import ObservationProcessor, TurnDelimiters
from models.processing.processor import PADS
from rollout.engine import SamplingParams
from rollout.jax_engine import JaxEngine
from sharding.walk import Walk

KIND, MOST, GAP = "vl", 90, 1e-4
END = processor(KIND).eos_ids[0]


class Prompts(Source):
    environment = "painter:Painter"
    context = "whole"

    async def draw(self, count: int) -> Any:
        drawn, skipped = await super().draw(count)
        inputs = processor(KIND).prepare("what is this?")
        how = {"environment": self.environment, "context": self.context}
        named = (dataclasses.replace(one.prompt, **how) for one in drawn)
        return [PreparedPrompt(prompt, inputs) for prompt in named], skipped


class Kept(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[tuple[Group, ...], dict[int, PreparedPrompt]]] = []

    def train(self, step: int, groups: Any, prepared: Any) -> TrainedStep:
        self.steps.append((groups, dict(prepared)))
        return super().train(step, groups, prepared)

    def weights(self) -> Any:
        """Each version has the weights of another random model."""
        return models.split(model(KIND, self.version))[1]


def lay_out(ids: Any, prompt: Prompt) -> ModelInput:
    return processor(KIND).prepare_ids(ids, [(medium.kind.value, source_of(medium)) for medium in prompt.media])


def episodes_in(folder: pathlib.Path, concurrency: int = 6) -> Episodes:
    pool = EnvironmentPool(folder, EnvironmentLimits(concurrency=concurrency, seconds=60.0))
    return Episodes(pool, ObservationProcessor(processor(KIND), TurnDelimiters()), lay_out, MOST, seed=7)


class EpisodeRun(Run):
    def __init__(self, folder: pathlib.Path, **settings: Any) -> None:
        self.engine = JaxEngine(model(KIND), slots=4, max_sequence_tokens=160)
        super().__init__(self.engine, **settings)  # type: ignore[arg-type]
        self.source, self.trainer = Prompts(), Kept()
        self.episodes = episodes_in(folder)

    def build(self) -> Any:
        runtime = super().build()
        runtime.environments = self.episodes
        never = tuple(processor(KIND).media_token_ids)
        runtime.sampling = SamplingParams(max_new_tokens=MOST, stop_ids=(END,), forbidden_ids=never)
        return runtime

    async def _go(self) -> Any:
        try:
            return await self.build().run()
        finally:
            await self.episodes.pool.close()
            await self.engine.close()


def assert_played(prepared: PreparedPrompt, response: Response) -> None:
    """A response is turns and observations in alternation; each observation shows its picture."""
    turns = turns_of(response)
    tokenizer, pad = processor(KIND), processor(KIND).media_token_ids
    for number, (said, seen) in enumerate(turns):
        assert not set(said) & set(pad) and END not in said[:-1]
        if number < len(turns) - 1:
            assert said[-1] == END and tokenizer.decode(list(seen)).split() == ["see", "now"]
    assert response.media_counts == (1,) * (len(turns) - 1) and len(response.media) == len(turns) - 1 <= PICTURES
    if response.media:
        inputs = prepared.responses[response.sample].laid_out()
        assert inputs.token_ids_T.tolist() == list(response.token_ids)
        want = tokenizer.prepare_ids(
            _single(response.token_ids), [(m.kind.value, source_of(m)) for m in response.media]
        )
        assert want.vision is not None and inputs.vision is not None
        np.testing.assert_array_equal(inputs.vision.patches_PX, want.vision.patches_PX)
        np.testing.assert_array_equal(inputs.feature_index_T, want.feature_index_T)
        np.testing.assert_array_equal(inputs.positions_3T, want.positions_3T + prepared.inputs.laid_out().next_position)


def _single(ids: Any) -> list[int]:
    """The ids with one placeholder in the place of each run."""
    pad = processor(KIND).tokenizer.token_to_id(PADS["image"])
    return [token for n, token in enumerate(ids) if n == 0 or token != pad or ids[n - 1] != pad]


def trainer_logprobs(groups: Any, prepared: Any, seed: int) -> dict[tuple[int, int], np.ndarray]:
    config = Config()
    config.packing.tokens_per_row, config.packing.rows_per_device, config.packing.patches_per_device = 160, 8, 512
    trained = model(KIND, seed)
    vision, text = trained.config.vision, trained.config.text
    composition = Composer(config, 1, vision, text).compose(groups, prepared)
    forbidden = tuple(processor(KIND).media_token_ids)
    found = [logprobs(trained, b.inputs, Walk(), never_sampled=forbidden)[0] for b in composition.batches]
    return unpack(composition, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "policy"),
    by_turns([("whole", None), ("whole", April(oversample=2.0)), ("turn", April(oversample=2.0)), ("images:1", None)]),
)
def test_what_is_trained_on_is_what_was_sampled_and_observed(tmp_path: pathlib.Path, context: str, policy: Any) -> None:
    """APRIL parks episodes, also between two turns. They go on under new weights. Log-probs of a context that was
    rewritten are those of its views."""
    run = EpisodeRun(tmp_path, steps=3, prompts_per_step=2, group_size=4, max_new_tokens=MOST, policy=policy)
    run.source.context = context
    limited(run._go())
    assert run.coordinator.ledger.trained == 6
    several = pictures = versions = 0
    entire = all_of(run.trainer.steps)
    trained = [trainer_logprobs(entire[0], entire[1], version) for version in range(3)]
    for groups, prepared in run.trainer.steps:
        for group in groups:
            assert sorted(sample.response.sample for sample in group.samples) == [0, 1, 2, 3]
            for response in (sample.response for sample in group.samples):
                assert_played(prepared[response.draw], response)
                several, pictures = several + bool(response.media), pictures + len(response.media)
                said = [(p, v) for p, v in zip(response.logprobs, response.versions, strict=True) if v != ENVIRONMENT]
                ours = [trained[v][response.draw, response.sample][n] for n, (_, v) in enumerate(said)]
                np.testing.assert_allclose(ours, [p for p, _ in said], rtol=0, atol=GAP)
                versions += len({v for _, v in said}) > 1
    assert several > 3 and pictures >= several
    if policy is None:  # when episodes are parked, and go on under other weights, depends on times
        assert pictures > several and not versions
    live = {draw for draw, _ in run.episodes._seats}
    assert live <= run.coordinator.ledger.entries.keys(), "environments of prompts that are done live on"
    begun = {f"draw {draw}" for draw in run.coordinator.ledger.entries}
    assert {session for session, _ in run.engine._scheduler.kept._prefixes} <= begun
    if (context, policy) == ("whole", None):
        assert run.engine.stats().tokens_prefilled < 0.7 * sum(map(prefilled_alone, entire[0]))


def prefilled_alone(group: Group) -> int:
    """The tokens to prefill if each turn computes the conversation again, but a group its prompt once."""
    prompt = len(processor(KIND).prepare("what is this?"))
    turns = [turns_of(sample.response) for sample in group.samples]
    ends = [np.cumsum([len(said) + len(seen) for said, seen in own[:-1]]) for own in turns]
    return prompt + sum(int((prompt + own).sum()) for own in ends)


def all_of(steps: Any) -> Any:
    groups = tuple(group for groups, _ in steps for group in groups)
    return groups, {draw: prompt for _, prepared in steps for draw, prompt in prepared.items()}


@pytest.mark.medium
def test_an_environment_that_is_gone_hears_the_recorded_turns_again(tmp_path: pathlib.Path) -> None:
    """It must then answer as before. The answer to a turn that it has heard is not asked for again."""

    async def play(environment: str) -> tuple[Any, Any, Any]:
        episodes, (prepared, said) = episodes_in(tmp_path), begun(4, environment)
        try:
            first = await episodes.act(prepared, said)
            assert first.response == (await episodes.act(prepared, said)).response
            prepared, said = dataclasses.replace(prepared, responses={2: first.inputs}), behind(first.response)
            second = await episodes.act(prepared, said)
            await episodes.end(4)
            return first, second, await episodes.act(prepared, said)
        finally:
            assert len(episodes.pool.episodes) <= (environment == "painter:Painter"), "an environment without a seat"
            await episodes.pool.close()

    first, second, again = limited(play("painter:Painter"))
    assert not first.done and first.response.media and (second.response, second.done) == (again.response, again.done)
    for name in ("Fickle", "Repainting"):
        text = f"painter:{name} of source s was begun anew, and answers turn 1 otherwise than before"
        with pytest.raises(EnvironmentFailure, match=text):
            limited(play(f"painter:{name}"))
    with pytest.raises(EnvironmentFailure, match=r"painter:Unwritable: .*vocabulary"):
        limited(play("painter:Unwritable"))


def begun(draw: int, environment: str, text: str = "?") -> tuple[PreparedPrompt, Response]:
    """A prompt, and a response of one turn."""
    prompt = Prompt("p", "s", text, "", draw=draw, environment=environment)
    ids = (*processor(KIND).encode("ab"), END)
    response = Response(f"{draw:08d}.00/2", draw, 2, ids, (-1.0,) * len(ids), (0,) * len(ids), "stop")
    return PreparedPrompt(prompt, processor(KIND).prepare("what?")), response


def behind(response: Response) -> Response:
    """The response with a further turn."""
    ids = (*response.token_ids, *processor(KIND).encode("cd e"), END)
    more = len(ids) - response.num_tokens
    return dataclasses.replace(
        response,
        token_ids=ids,
        logprobs=(*response.logprobs, *(-1.0,) * more),
        versions=(*response.versions, *(1,) * more),
    )


@pytest.mark.medium
def test_the_snapshot_of_a_parked_environment_stands_in_checkpoints(tmp_path: pathlib.Path) -> None:
    """A new environment gets the snapshot if the old one heard nothing after it. Otherwise it hears all turns."""
    heard = tmp_path / "heard"

    async def play() -> None:
        played = [episodes_in(tmp_path / "media") for _ in range(4)]
        prepared, said = begun(4, "painter:Remembering", str(heard))
        try:
            first = await played[0].act(prepared, said)
            after, said_next = dataclasses.replace(prepared, responses={2: first.inputs}), behind(first.response)
            await played[0].park(4)
            assert not played[0].pool.episodes
            played[1].load_state_dict(json.loads(json.dumps(played[0].state_dict())))
            second = await played[1].act(after, said_next)
            assert heard.read_text().splitlines() == ["ab", "cd e"], "only the snapshot knows the first turn"
            played[2].load_state_dict(json.loads(json.dumps(played[0].state_dict())))
            assert (await played[2].act(prepared, said)).response == first.response, "its answer is in no checkpoint"
            assert heard.read_text().splitlines() == ["ab", "cd e", "ab"]
            again = await played[3].act(after, said_next)
            assert heard.read_text().splitlines() == ["ab", "cd e", "ab", "ab", "cd e"], "without a snapshot"
            assert (second.response, second.done) == (again.response, again.done)
        finally:
            for episodes in played:
                await episodes.pool.close()

    limited(play())


@pytest.mark.medium
def test_a_turn_that_is_asked_for_twice_is_heard_once(tmp_path: pathlib.Path) -> None:
    """A response that is parked while its environment thinks goes on, and its turn ends again."""

    async def play() -> list[Any]:
        episodes = episodes_in(tmp_path / "media")
        prepared, said = begun(4, "painter:Slow", str(tmp_path / "heard"))
        try:
            return await asyncio.gather(*(episodes.act(prepared, said) for _ in range(3)))
        finally:
            await episodes.pool.close()

    answers = limited(play())
    assert (tmp_path / "heard").read_text().splitlines() == ["ab"]
    assert len({answer.response.token_ids for answer in answers}) == 1


@pytest.mark.medium
def test_parked_responses_hold_no_environment_and_keep_their_answer(tmp_path: pathlib.Path) -> None:
    """Else a draw, or an evaluation, could wait for ever for their slots."""

    async def play() -> None:
        episodes = episodes_in(tmp_path, concurrency=1)
        (first, said), (second, other) = begun(4, "painter:Painter"), begun(5, "painter:Painter")
        try:
            answer = await episodes.act(first, said)
            assert not answer.done and len(episodes.pool.episodes) == 1
            await episodes.park(4)
            assert not episodes.pool.episodes
            assert (await episodes.act(first, said)).response == answer.response  # kept, without an environment
            assert not episodes.pool.episodes
            await episodes.act(second, other)  # has the only slot
            await episodes.park(5, other.sample)
            prepared = dataclasses.replace(first, responses={2: answer.inputs})
            assert (await episodes.act(prepared, behind(answer.response))).response.rewards == (
                0.25,
                0.5,
            )  # begun anew, turn by turn
        finally:
            await episodes.pool.close()

    limited(play())


@pytest.mark.medium
def test_environments_that_are_ended_while_they_begin_or_answer_leave_their_slots(tmp_path: pathlib.Path) -> None:
    async def play() -> None:
        episodes = episodes_in(tmp_path / "media", concurrency=1)
        first, second, third = (begun(draw, "painter:Slow", str(tmp_path / "heard")) for draw in (4, 5, 6))
        try:
            answering = asyncio.create_task(episodes.act(*first))
            while not (tmp_path / "heard").exists():
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(episodes.act(*second))  # for the only slot
            await asyncio.sleep(0.05)
            await episodes.end(5)
            await episodes.end(4)
            results = await asyncio.gather(answering, waiting, return_exceptions=True)
            assert [type(result) for result in results] == [EnvironmentFailure] * 2
            assert not (await episodes.act(*third)).done
            await episodes.end(6, 2)
            assert not episodes.pool.episodes and not episodes._seats
        finally:
            await episodes.pool.close()

    limited(play())


@pytest.mark.slow
def test_an_environment_that_fails_costs_an_attempt_and_is_named(tmp_path: pathlib.Path) -> None:
    run = EpisodeRun(tmp_path, steps=1, prompts_per_step=1, group_size=2, max_new_tokens=MOST, max_attempts=2)
    heard: list[int] = []
    act = run.episodes.act

    async def failing(prepared: PreparedPrompt, response: Response) -> Any:
        heard.append(response.draw)
        if response.draw == 0:
            raise failure
        return await act(prepared, response)

    failure = EnvironmentFailure(Fault.RAISED, "out of order")
    run.episodes.act = failing  # type: ignore[method-assign]
    limited(run._go())
    [skipped] = run.coordinator.ledger.skipped
    assert skipped.draw == 0 and skipped.reason == "failed 2 times, last: out of order"
    assert run.coordinator.ledger.trained == 1 and heard.count(0) >= 2
