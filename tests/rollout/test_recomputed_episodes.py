"""Episodes of runs, dumped and computed again: turns of one version, parked between turns and within one."""

import dataclasses
import json
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
from protocol_cases import model, processor
from runtime_cases import limited
from test_episodes import KIND, MOST, EpisodeRun
from turns import by_turns

import models
from fluxjax.base.errors import DataError
from fluxjax.base.event_loop import run_async
from fluxjax.base.scored import request_seed
from fluxjax.base.types import ENVIRONMENT, Media, MediaKind, PreparedPrompt, Response
from fluxjax.config import Config
from fluxjax.coordinator.messages import Turn
from fluxjax.coordinator.policies.april import April
from fluxjax.report.samples import dump_samples, read_samples
from fluxjax.run.recomputation import Recomputation, _recorded, computed_again
from fluxjax.runtime.conversations import turn_request
from rollout.jax_engine import JaxEngine


class Again:
    """Computes responses of a run again, on an engine of its own."""

    def __init__(self, run: EpisodeRun) -> None:
        self.engine, self.run = JaxEngine(model(KIND), slots=4, max_sequence_tokens=160), run
        self.version = -1

    def engine_of(self, version: int) -> JaxEngine:
        if version != self.version:  # else it keeps the conversation
            run_async(self.engine.update_weights(version, models.split(model(KIND, version))[1]))
            self.version = version
        return self.engine

    def __call__(self, response: Response, prepared: PreparedPrompt) -> Recomputation:
        bare = dataclasses.replace(prepared, responses={})
        parts: Any = types.SimpleNamespace(processor=processor(KIND), sampling=self.run.runtime.sampling)
        parts.config = Config(seed=self.run.runtime.seed)
        return computed_again(response, bare, parts, self.engine_of)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "policy"), by_turns([("whole", None), ("whole", April(oversample=2.0)), ("turn", None)])
)
def test_dumped_episodes_are_computed_again(tmp_path: pathlib.Path, context: str, policy: Any) -> None:
    steps = 2 if policy is None else 4
    run = EpisodeRun(
        tmp_path / "observations", steps=steps, prompts_per_step=2, group_size=3, max_new_tokens=MOST, policy=policy
    )
    run.source.context = context
    limited(run._go())
    again, several = Again(run), 0
    for step, (groups, prepared) in enumerate(run.trainer.steps, 1):
        dump_samples(tmp_path, step, groups, processor(KIND).decode, 6)
        responses = {s.response.data: (s.response, prepared[g.prompt.draw]) for g in groups for s in g.samples}
        for record in read_samples(tmp_path, step):
            recorded = _recorded(record, tmp_path)
            assert recorded is not None
            response, prompt = responses[recorded.data]
            assert recorded.media == response.media and recorded.media_counts == response.media_counts
            equal, differs, gap, observed = again(recorded, prompt)
            assert not differs and equal == response.num_trained and gap < 1e-4
            assert observed == response.num_tokens - response.num_trained
            several += bool(observed)
    assert several > 3
    run_async(again.engine.close())


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pathlib.Path, Again]]:
    """A synchronous run of one step, with its samples."""
    folder = tmp_path_factory.mktemp("played")
    run = EpisodeRun(folder / "observations", steps=1, prompts_per_step=2, group_size=4, max_new_tokens=MOST)
    limited(run._go())
    dump_samples(folder, 1, run.trainer.steps[0][0], processor(KIND).decode, 8)
    again = Again(run)
    yield folder, again
    run_async(again.engine.close())


@pytest.mark.slow
@pytest.mark.parametrize("parked", [True, False], ids=["parked", "in flight"])
def test_a_turn_that_goes_on_under_new_weights(played: tuple[pathlib.Path, Again], parked: bool) -> None:
    """In a request of its own, or in the request of the turn: both are computed again."""
    folder, again = played
    records = filter(None, (_recorded(record, folder) for record in read_samples(folder, 1)))
    [response, *_] = [r for r in records if r.media_counts == (1,) and r.turn_tokens[1] > 2]
    prepared = again.run.trainer.steps[0][1][response.draw]
    turn = len(response.versions) - response.turn_tokens[1]
    start = turn + 2

    def up_to(end: int) -> Response:
        columns = {name: getattr(response, name)[:end] for name in ("token_ids", "logprobs", "versions")}
        return dataclasses.replace(response, **columns)

    inputs, begin = prepared.responses[response.sample].laid_out(), start if parked else turn
    inputs = dataclasses.replace(
        inputs,
        token_ids_T=inputs.token_ids_T[:begin],
        positions_3T=inputs.positions_3T[:, :begin],
        feature_index_T=inputs.feature_index_T[:begin],
        next_position=int(inputs.positions_3T[0, begin - 1]) + 1,
    )
    told = dataclasses.replace(prepared, responses={response.sample: inputs})
    runtime = again.run.runtime
    seed = request_seed(runtime.seed, response.draw)
    request = turn_request(Turn(prepared.prompt, up_to(begin), 0), told, runtime.sampling, seed, runtime._merge_unit)
    if not parked:
        request = dataclasses.replace(request, prefix_ids=(response.token_ids[turn:start],))

    async def chunks() -> list[Any]:
        return [chunk async for chunk in engine.generate(request)]

    engine = again.engine_of(5)
    longer_by = run_async(chunks())
    before = up_to(start)
    new = dataclasses.replace(
        before,
        token_ids=(*before.token_ids, *(token for chunk in longer_by for token in chunk.token_ids)),
        logprobs=(*before.logprobs, *(value for chunk in longer_by for value in chunk.logprobs)),
        versions=(*before.versions, *(version for chunk in longer_by for version in chunk.versions)),
    )
    assert new.versions[-1] == 5 and new.turn_tokens[1] > 2
    equal, differs, gap, observed = again(new, prepared)
    assert not differs and equal + observed == new.num_tokens and gap < 1e-4


@pytest.mark.slow
def test_what_differs_or_is_missing_is_named(played: tuple[pathlib.Path, Again]) -> None:
    folder, again = played
    record = next(r for r in reversed(read_samples(folder, 1)) if r.get("observed"))
    recorded = _recorded(record, folder)
    assert recorded is not None
    prompt = again.run.trainer.steps[0][1][recorded.draw]
    at = recorded.versions.index(ENVIRONMENT)
    behind = next(n for n, version in enumerate(recorded.versions) if n > at and version != ENVIRONMENT)
    ids = list(recorded.token_ids)
    there, ids[behind] = ids[behind], ids[behind] % 5 + (ids[behind] % 5 == ids[behind])
    other = again(dataclasses.replace(recorded, token_ids=tuple(ids)), prompt)
    assert other.differs.startswith(f"{behind} is {there} (") and other.equal == recorded.turn_tokens[0]
    gone = Media(MediaKind.IMAGE, str(folder / "observations" / "gone"))
    with pytest.raises(DataError, match=r"the observations of the sample can't be prepared: .*no such file"):
        again(dataclasses.replace(recorded, media=(gone, *recorded.media[1:])), prompt)
    record["numbers"] = json.dumps(1)
    with pytest.raises(DataError, match="damaged"):
        _recorded(record, folder)
