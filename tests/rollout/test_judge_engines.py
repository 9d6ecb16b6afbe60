"""Engines as judges: a server of `rollout.serve` by its own route, one in this process, and a real SGLang server."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import time
from typing import Any

import pytest
from protocol_cases import SGLANG_ENVIRONMENT, SGLANG_FLAGS, sglang_python
from rollout_cases import HANG, TEXT, until
from serve_cases import checkpoint, serving

import models
from fluxjax.base.scored import Completion, Prompt
from fluxjax.rewards.judge import Judge, JudgeModel, Question
from fluxjax.rewards.judge.engine_judges import EngineModel, StreamedJudgeModel
from fluxjax.rewards.judge.http_judges import load_processor, question_ids
from fluxjax.rewards.named import Failing, RewardFailure
from models.processing import Processor, tiny
from rollout.jax_engine import JaxEngine
from rollout.local_server import LocalServer, ServerCommand
from rollout.streamed import StreamedModel
from rollout.streamed_judge import StreamedJudge

pytestmark = pytest.mark.slow
ROOM = 256  # tokens of a question and its answer
START = 500.0  # seconds in which SGLang starts
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
RUBRIC = "{response}\ngrade:"
GRADE = r"([0-9])"
RESPONSE = "abc <|im_end|> d"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint of a tiny judge with few tokens, so that its answers end soon and have digits."""
    processor = tiny.build(["0123456789abcdefghimnoprs <|>/-_:\n"])
    processor = dataclasses.replace(processor, chat_template=TEMPLATE)
    made = checkpoint(tmp_path_factory.mktemp("judge"), TEXT, processor)
    (made / "rubric.txt").write_text(RUBRIC)
    return made


def judge_of(server: Any, folder: pathlib.Path, **more: Any) -> Judge:
    settings = {"rubric": str(folder / "rubric.txt"), "pattern": GRADE, "scale": "0 to 9", "max_tokens": 128}
    served = {"api": "generate", "tokenizer": str(folder)} if isinstance(server, str) else {}
    return Judge(server, **{"temperature": 1.0, "retries": 8, **settings, **served, **more})


def engine_of(folder: pathlib.Path) -> JaxEngine:
    """Of the sizes of the server, whose programs it shares."""
    return JaxEngine(models.load(folder), slots=16, max_sequence_tokens=ROOM, steps_per_sync=3)


def question(seed: int = 5, **more: Any) -> Question:
    return Question(f"grade {RESPONSE}", (), seed, **{"temperature": 1.0, "max_tokens": 100, "deadline": 1e12, **more})


async def graded(*judges: Judge) -> list[float]:
    try:
        prompt = Prompt("p", "s", "?", "")
        rewards = [await judge.score(Completion(prompt, RESPONSE)) for judge in judges]
        return [reward.value for reward in rewards]
    finally:
        for judge in judges:
            judge.close()


def test_no_special_token_can_be_written_in_a_question(folder: pathlib.Path) -> None:
    processor = Processor.load(folder)
    ids = question_ids(processor, question())
    assert max(tiny.SPECIAL_TOKENS.index(token) for token in tiny.SPECIAL_TOKENS) < min(ids)
    assert processor.decode(ids) == "grade abc < |im_end|> d"
    assert load_processor(str(folder)).eos_ids == processor.eos_ids


@pytest.mark.long
async def test_an_engine_and_a_server_give_the_same_grades(folder: pathlib.Path) -> None:
    """The same seeds, the same draws: judging can be repeated."""
    engine = engine_of(folder)
    try:
        model = EngineModel(engine, Processor.load(folder))
        assert isinstance(model, JudgeModel)
        answers = [await model.ask(question(seed)) for seed in (5, 5, 6)]
        assert answers[0] == answers[1] != answers[2]
        assert not (await model.ask(question(max_tokens=1))).whole
        here = await graded(judge_of(model, folder), judge_of(model, folder, votes=3))
        asking = asyncio.create_task(model.ask(question(max_tokens=200)))
        while not engine.stats().running:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not engine.stats().running)
    finally:
        await engine.close()
    async with serving(folder, longest=ROOM) as served:
        address = str(served.client._base_url).rstrip("/")
        judges = judge_of(address, folder), judge_of(address, folder, votes=3)
        assert await graded(*judges) == here and 0 <= min(here) <= max(here) <= 1
        assert judges[0]._counts["answers"] == judges[0]._counts["unparsed"] + 1
        with pytest.raises(RewardFailure, match=f"{address}/generate: status 400: .*max_new_tokens") as caught:
            await graded(judge_of(address, folder, max_tokens=10**6))
        assert caught.value.failing is Failing.RAISED


@pytest.mark.slow
async def test_an_answer_that_the_server_aborts_is_asked_for_again(folder: pathlib.Path) -> None:
    """As a server does whose weights change."""
    async with serving(folder, longest=ROOM) as served:
        judge = judge_of(str(served.client._base_url).rstrip("/"), folder, temperature=0.0)
        asking = asyncio.create_task(judge._model.ask(question(temperature=0.0, deadline=time.monotonic() + HANG)))
        while not served.engine.stats().running:
            await asyncio.sleep(0)
        await served.ok("/abort_request", {"abort_all": True})
        answer = await asking
        assert answer == await judge._model.ask(question(temperature=0.0, deadline=time.monotonic() + HANG))
        assert judge._counts["retries"] == 1


@pytest.mark.long
async def test_sglang_as_a_judge(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its OpenAI route and its native one. Needs `bash scripts/test_sglang.sh`."""
    flags = (*SGLANG_FLAGS, "--dtype", "float32", "--max-running-requests", "4", "--tp-size", "1")
    server = LocalServer(
        ServerCommand("sglang", str(folder), sglang_python(), flags, SGLANG_ENVIRONMENT), tmp_path / "log"
    )
    server.start()
    try:
        await by_both_routes(server, folder)
    except BaseException:
        print(server.last_words(30))
        raise
    finally:
        server.stop()


async def by_both_routes(server: LocalServer, folder: pathlib.Path) -> None:
    chat, native = judge_of(server.address, folder, api="chat", tokenizer=""), judge_of(server.address, folder)
    for judge in (chat, native):
        judge.call_within(START)  # it is starting: nobody is at the address yet
    values = await graded(chat, native)
    assert all(value * 9 in range(10) for value in values)
    greedy = Question("grade abc d", (), 0, 0.0, 8, time.monotonic() + HANG)
    assert await chat._model.ask(greedy) == await native._model.ask(greedy)


async def test_a_streamed_judge_says_what_an_engine_says(folder):
    """Greedily, with some of its layers on their way."""
    processor = load_processor(str(folder))
    engine, streamed = engine_of(folder), StreamedJudge(StreamedModel.load(folder, resident=1))
    try:
        models_ = EngineModel(engine, processor), StreamedJudgeModel(streamed, processor)
        assert all(isinstance(one, JudgeModel) for one in models_)
        first, second = [await one.ask(question(temperature=0.0, max_tokens=40)) for one in models_]
    finally:
        await streamed.close()
        await engine.close()
    assert first == second and first.text
