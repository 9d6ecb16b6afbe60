"""Whatever a client of `rollout.serve` sends is answered, what is wrong with 4xx, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junk import JUNK, places, replaced
from rollout_cases import HANG, VL
from serve_cases import refused, serving, single
from turns import third_of

from rollout import wire
from rollout.serve_weights import given_version


@pytest.mark.medium
async def test_only_those_with_the_token_are_served(checkpoints):
    async with serving(checkpoints["vl"], token="secret") as served:
        await served.ok("/generate", single(served, "r", stream=False))
        for value in ("", "Bearer", "Bearer secre", "Bearer secret2", "secret", "Bearer ü"):
            for path in ("/generate", "/nothing", "/metrics", "/health/"):
                async with served.client.post(path, json={}, headers={"Authorization": value}) as reply:
                    assert reply.status == 401 and "secret" not in await reply.text()
            async with served.client.get("/health", headers={"Authorization": value}) as reply:
                assert reply.status == 200


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": None}, "input_ids must be"),
    ({"input_ids": []}, "input_ids must be"),
    ({"input_ids": [[]]}, "input_ids of"),
    ({"input_ids": [[1], 2], "rid": None}, "must be a list of integers"),
    ({"input_ids": [1.5]}, "must be a list of integers"),
    ({"input_ids": [True]}, "must be a list of integers"),
    ({"input_ids": [10**30]}, "vocabulary of"),
    ({"input_ids": [-1]}, "vocabulary of"),
    ({"input_ids": [1, 60]}, "vocabulary of"),
    ({"input_ids": [8] * 100}, "exceed rollout.max_sequence_tokens=64"),
    ({"rid": ""}, "rid must be"),
    ({"rid": 3}, "rid must be"),
    ({"input_ids": [[8], [9]], "rid": ["a", "a"]}, "two samples"),
    ({"input_ids": [[8], [9]], "rid": ["a"]}, "rid must be a list with one entry for each of the 2 input_ids"),
    ({"input_ids": [[8], [9]], "rid": "a"}, "rid must be a list"),
    ({"sampling_params": 3}, "sampling_params of"),
    ({"sampling_params": {"frequency_penalty": 1}}, "frequency_penalty is not supported"),
    ({"sampling_params": {"min_p": [0.0, 0.1]}}, "min_p is not supported: only null and false"),
    ({"sampling_params": {"repetition_penalty": 0}}, "only null and 1"),
    ({"sampling_params": {"stop": ["x"]}}, "stop is not supported"),
    ({"max_tokens": 3}, "max_tokens is not supported"),
    ({"logprob_start_len": 0}, "only null and -1"),
    ({"top_logprobs_num": 5}, "top_logprobs_num"),
    ({"text": "and this"}, "text is not supported"),
    ({"image_data": ["\ud800"]}, "image_data must have media in the format"),
    ({"rid": "\ud800", "input_ids": [1, 60]}, "vocabulary of"),
    ({"\ud800": 1}, "is not supported"),
    ({"session_id": 3}, "session_id must be a string"),
    ({"sampling_params": {"n": 2}}, "n=2 must be in 1 .. 1"),
    ({"sampling_params": {"max_new_tokens": "3"}}, "max_new_tokens=.3. must be an integer"),
    ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens=0"),
    ({"sampling_params": {"max_new_tokens": 2**40}}, "max_new_tokens="),
    ({"sampling_params": {"temperature": -1}}, "temperature="),
    ({"sampling_params": {"temperature": [1]}}, "temperature=.1. must be a number"),
    ({"sampling_params": {"temperature": 10**400}}, "temperature=inf must be finite"),
    ({"sampling_params": {"temperature": float("nan")}}, "temperature=nan must be finite"),
    ({"sampling_params": {"top_p": 0}}, "top_p="),
    ({"sampling_params": {"top_k": -2}}, "top_k="),
    ({"sampling_params": {"stop_token_ids": [{}]}}, "stop_token_ids must be a list"),
    ({"sampling_params": {"stop_token_ids": 3}}, "stop_token_ids must be a list"),
    ({"sampling_params": {"logit_bias": {"3": -5}}}, "which forbids a token"),
    ({"sampling_params": {"logit_bias": {"3": float("nan")}}}, "which forbids a token"),
    ({"sampling_params": {"logit_bias": {"x": -1e30}}}, "a value for each of its token ids"),
    ({"sampling_params": {"logit_bias": [3]}}, "a value for each of its token ids"),
    ({"sampling_params": {"logit_bias": {str(id): -1e30 for id in range(60)}}}, "every token"),
    ({"sampling_params": {"stream_interval": 0}}, "stream_interval=0 must be"),
    ({"sampling_params": {"sampling_seed": "1"}}, "sampling_seed=.1. must be"),
    ({"sampling_params": {"custom_params": [1]}}, "custom_params must be"),
    ({"sampling_params": {"custom_params": {"sample": -1}}}, "custom_params.sample=-1 must be"),
    ({"sampling_params": {"custom_params": {"begun": 3}}}, "custom_params.begun=3 must be"),
    ({"image_data": [3]}, "image_data must have media in the format"),
    ({"image_data": "/etc/hostname"}, "this server decodes no files"),
    ({"video_data": ["data:video/mp4;base64,AAAA"]}, "video_data must have media in the format"),
    ({"image_data": ["x" * 5000]}, "image_data must have media in the format"),
    ({"input_ids": [8, 6, 9]}, "input_ids of .*1 media placeholders for 0 media"),
    ({"image_data": [wire.FORMAT + "{"]}, "media: "),
    ({"image_data": [wire.FORMAT + '{"key": "k"}']}, "positions"),
    ({"image_data": [wire.FORMAT + '{"key": "k"}', "x"]}, "one entry for each sample"),
]


@pytest.mark.medium
async def test_bad_bodies_are_refused_by_the_name_of_the_field(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        plain = {"input_ids": [8, 9, 10], "sampling_params": {"max_new_tokens": 2}}
        for changes, complaint in BAD:
            await refused(served, plain | changes, complaint)
        for raw in (b"", b"[1", b"[]", b"3", b"\xff", b"[" * 10**5, b'{"rid": ' + b"9" * 10**4 + b"}"):
            for path in ("/generate", "/abort_request", "/update_weights_from_disk", "/pull_weights"):
                async with served.client.post(path, data=raw) as reply:
                    assert reply.status == 400, (raw[:20], await reply.text())
        await served.ok("/generate", plain)
        assert served.engine.stats().running == served.engine.stats().waiting == 0


NOTHING_ASKED = {
    "stop": None, "stop_regex": [], "min_p": 0, "frequency_penalty": 0.0, "presence_penalty": 0, "regex": None,
    "repetition_penalty": 1.0, "min_new_tokens": 0, "json_schema": None, "no_stop_trim": True, "n": None, "top_k": None,
    "temperature": None, "ignore_eos": None, "stop_token_ids": None, "stream_interval": None,
}  # fmt: skip
NOTHING_MORE = {
    "text": None, "logprob_start_len": -1, "top_logprobs_num": 0, "return_hidden_states": False, "lora_path": None,
    "priority": 3, "session_id": "s", "return_logprob": False, "stream": False, "token_ids_logprob": [],
}  # fmt: skip


@pytest.mark.slow
async def test_values_that_ask_for_nothing_are_taken_and_stop_ids_are_added(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        eos = served.processor.eos_ids[0]
        forbidden = {str(id): -1e30 for id in range(60) if id not in (eos, 9)}  # either ends it, sooner or later

        def body(**sampling: Any) -> dict[str, Any]:
            wanted = {"max_new_tokens": 40, "temperature": 2.0, "logit_bias": forbidden, "sampling_seed": 3}
            return {"input_ids": [8, 10], "sampling_params": wanted | sampling}

        async def ids(body: dict[str, Any]) -> list[int]:
            return (await served.ok("/generate", body))["output_ids"]

        plain = await ids(body())
        assert await ids(body(**{k: v for k, v in NOTHING_ASKED.items() if k != "temperature"})) == plain
        assert await ids(body() | NOTHING_MORE) == plain
        for seed in range(2):
            ended = await ids(body(sampling_seed=seed, stop_token_ids=[11]))
            assert ended == await ids(body(sampling_seed=seed)) and eos not in ended[:-1]
            assert len(await ids(body(sampling_seed=seed, stop_token_ids=[9]))) == 1
            assert len(await ids(body(sampling_seed=seed, stop_token_ids=[9], ignore_eos=True))) == 40
        batch = {"input_ids": [[8], [9]], "top_logprobs_num": [0, 0], "lora_path": [None, None]}
        assert len(await served.ok("/generate", batch | {"sampling_params": {"max_new_tokens": 2}})) == 2
        for path, field in (("/update_weights_from_disk", "model_path"), ("/pull_weights", "source_dir")):
            body_of = {"local_checkpoint_dir": "l", "target_version": 1, field: "\ud800"}
            status, reply = await served.post(path, body_of)
            assert status == 400 and not reply["success"]


async def test_a_batch_with_one_bad_request_leaves_no_trace(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        await served.ok("/pause_generation", {"mode": "in_place"})
        long = {"input_ids": [[8], [9] * 60], "rid": ["a", "b"], "sampling_params": {"max_new_tokens": 9}}
        await refused(served, long, "request 'b/'.*exceed rollout.max_sequence_tokens")
        assert served.engine.stats().waiting == 0 and not served.server._answers


@pytest.mark.medium
async def test_media_in_our_format_that_do_not_fit_are_refused(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        good = single(served, "m", 4, "mixed", stream=False)
        await served.ok("/generate", good)

        def changed(field: str, **changes: Any) -> dict[str, Any]:
            media = json.loads(good[field][0][len(wire.FORMAT) :])
            return good | {field: [wire.FORMAT + json.dumps(media | {"key": uuid.uuid4().hex} | changes)]}

        def ints(*shape: int, value: int = 2) -> Any:
            return wire.array_json(np.full(shape, value, np.int32))

        def floats(*shape: int) -> Any:
            return wire.array_json(np.full(shape, np.nan, np.float32))

        for body, complaint in [
            (good | {"input_ids": good["input_ids"][:-1]}, "positions has the shape"),
            (changed("image_data", grid_thw=ints(2, 3)), "grids of 16"),
            (changed("image_data", grid_thw=ints(2, 3, value=0)), "grid_thw must have sides"),
            (changed("image_data", grid_thw=ints(2, 3, value=-4)), "grid_thw must have sides"),
            (changed("image_data", grid_thw=ints(6)), "must be .P, X. and int32"),
            (changed("image_data", grid_thw=floats(2, 3)), "must be .P, X."),
            (changed("image_data", grid_thw=None), "grid_thw"),
            (changed("video_data", patches={"dtype": "int32", "shape": [10**30], "data": ""}), "patches"),
            (changed("video_data", patches={"dtype": "object", "shape": [1], "data": ""}), "none of"),
            (changed("video_data", patches=ints(4, 4)), "video_data"),
            (changed("image_data", positions=ints(3, 2)), "positions has the shape"),
            (changed("image_data", positions=None), "positions"),
            (changed("image_data", position_delta=1.5), "position_delta"),
            (changed("image_data", position_delta=2**40), "next_position"),
            (changed("image_data", patches=floats(24, VL.vision.patch_values)), "NaN or infinity"),
            (good | {"video_data": ["x"]}, "video_data must have media in the format"),
        ]:  # fmt: skip
            await refused(served, body, complaint)
        await served.ok("/generate", good)


@pytest.fixture(scope="module")
def live(checkpoints):
    """A server that goes on between the examples of a test: `(served, run)`."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        served = runner.run(stack.enter_async_context(serving(checkpoints["vl"])))
        yield served, runner.run
        runner.run(stack.aclose())


@pytest.mark.slow
@settings(max_examples=third_of(60))
@given(data=st.data())
def test_any_body_is_answered_and_the_server_goes_on(live, data):
    served, run = live
    name = data.draw(st.sampled_from(["text", "image", "mixed"]))
    good = served.body(served.request(name, rid="f", n=2, max_new_tokens=3), stream=data.draw(st.booleans()))
    body: Any = good
    for field in (set(good) & set(wire.FIELDS)) if data.draw(st.booleans()) else ():
        media = json.loads(good[field][0][0][len(wire.FORMAT) :])
        media = replaced(media, data.draw(st.sampled_from(places(media))), data.draw(JUNK))
        body = replaced(body, (field, 0, 0), wire.FORMAT + json.dumps(media))
    for _ in range(data.draw(st.integers(0, 2))):
        body = replaced(body, data.draw(st.sampled_from(places(body))), data.draw(JUNK))
    status, reply = run(asyncio.wait_for(served.post("/generate", body), HANG))
    assert status in (200, 400), reply
    assert status == 400 or body != good or "error" not in reply
    assert run(served.get("/health")) == ""
    assert not served.server._answers


@pytest.mark.slow
@settings(max_examples=third_of(30))
@given(path=st.sampled_from(["/abort_request", "/pause_generation", "/continue_generation",
                             "/update_weights_from_disk", "/weights_checker"]),
       body=JUNK | st.dictionaries(st.sampled_from(["rid", "abort_all", "mode", "model_path", "weight_version",
                                                    "action"]), JUNK))  # fmt: skip
def test_any_command_is_answered(live, path, body):
    served, run = live
    status, reply = run(asyncio.wait_for(served.post(path, body), HANG))
    assert status in (200, 400), reply
    run(served.ok("/continue_generation"))


@given(st.integers(0, 10**18 - 1))
def test_versions_are_written_as_they_were_read(number):
    assert given_version({"weight_version": str(number)}) == number
