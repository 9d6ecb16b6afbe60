"""`python -m rollout.serve`: the embedded engine behind SGLang's routes.

1. A reply has the tokens and log-probs, bit for bit, that the engine gives in the same process: for whole groups, parts
   of one, continued prefixes, and media in our format. Samples of a prompt are one request, prefilled once.
2. Media come as patches only (`test_serve_bodies.py`).
3. The events of a stream add up to the reply without one.
4. Aborts, pauses, updates and disconnections do to samples what they do in the engine.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from rollout_cases import HANG, LONGEST, until
from serve_cases import (
    PROMPTS,
    SlowEngine,
    checksums,
    last,
    on_disk,
    refused,
    same,
    serving,
    single,
)

from rollout import serve_app

# --- 1, 2, 3: what is generated -------------------------------------------------------------------


@pytest.mark.slow
async def test_replies_are_those_of_the_engine(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        for name in PROMPTS:
            request = served.request(name, n=4, seed=-5)
            answers = await served.in_process(request)
            assert len({answer.ids for answer in answers}) > 1
            before = served.engine.stats().tokens_prefilled
            replies = await served.ok("/generate", served.body(request, stream=False))
            assert served.engine.stats().tokens_prefilled - before == len(request.prompt)
            for i, (reply, answer) in enumerate(zip(replies, answers, strict=True)):
                same(reply, answer)
                meta = reply["meta_info"]
                assert (meta["id"], meta["weight_version"]) == (f"r-{i}", "0")
                assert meta["prompt_tokens"] == len(request.prompt)
                assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": len(answer.ids)}]
                assert reply["text"] == served.processor.decode(answer.ids, skip_special_tokens=False)
            for samples in ([3], [1, 3], [3, 0]):
                replies = await served.ok("/generate", served.body(request, samples, stream=False))
                for sample, reply in zip(samples, replies, strict=True):
                    same(reply, answers[sample])


@pytest.mark.medium
async def test_prefixes_are_continued(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        for name in ("text", "mixed"):
            whole = await served.in_process(served.request(name, n=3, seed=1))
            prefixes = tuple(answer.ids[:k] for answer, k in zip(whole, (0, 4, len(whole[2].ids)), strict=True))
            request = served.request(name, n=3, seed=1, prefix_ids=prefixes)
            answers = await served.in_process(request)
            replies = await served.ok("/generate", served.body(request, stream=False))
            for reply, answer, prefix, all_of_it in zip(replies, answers, prefixes, whole, strict=True):
                same(reply, answer)
                assert prefix + tuple(reply["output_ids"]) == all_of_it.ids
                assert reply["meta_info"]["prompt_tokens"] == len(request.prompt) + len(prefix)


@pytest.mark.medium
async def test_events_add_up_to_the_reply(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        for interval in (1, 4):
            request = served.request("image", n=3)
            body = served.body(request)
            for params in body["sampling_params"]:
                params["stream_interval"] = interval
            replies = await served.ok("/generate", body | {"stream": False})
            seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
            async for event in served.events(body):
                seen[event.pop("index")].append(event)
            for events, reply in zip(seen.values(), replies, strict=True):
                assert events[-1] == reply
                counts = [event["meta_info"]["completion_tokens"] for event in events]
                assert counts[0] == 1 and len(counts) > 2
                assert all(late - early >= interval for early, late in itertools.pairwise(counts[:-1]))
                for event in events[:-1]:
                    meta, count = event["meta_info"], event["meta_info"]["completion_tokens"]
                    assert meta["finish_reason"] is None and "weight_versions" not in meta
                    assert event["output_ids"] == reply["output_ids"][:count]
                    assert meta["output_token_logprobs"] == reply["meta_info"]["output_token_logprobs"][:count]
            body["sampling_params"] = body["sampling_params"][0]
            alone = {key: value[0] if isinstance(value, list) else value for key, value in body.items()}
            events = [event async for event in served.events(alone)]
            assert "index" not in events[-1] and events[-1]["output_ids"] == replies[0]["output_ids"]


@pytest.mark.slow
async def test_a_body_without_extras_ends_at_the_end_token_and_differs_between_samples(checkpoints):
    async with serving(checkpoints["text"]) as served:
        ids = served.processor.encode("abc")
        free = {"input_ids": [ids] * 8, "sampling_params": {"max_new_tokens": 40, "temperature": 2.0}}
        replies = await served.ok("/generate", free)
        assert len({tuple(reply["output_ids"]) for reply in replies}) > 6
        assert any(reply["meta_info"]["finish_reason"]["type"] == "stop" for reply in replies)
        for reply in replies:
            stops = reply["meta_info"]["finish_reason"]["type"] == "stop"
            assert (reply["output_ids"].count(0) == 1) == stops
        same_seed = {"input_ids": [ids] * 2, "sampling_params": {"sampling_seed": 1, "max_new_tokens": 8}}
        first, second = await served.ok("/generate", same_seed)  # as from SGLang
        assert first["output_ids"] == second["output_ids"]


async def test_media_belong_to_the_body_that_has_their_patches(checkpoints):
    async with serving(checkpoints["vl"]) as served:
        body = served.body(served.request("image", n=2), stream=False)
        keyed = {key: value[1:] if isinstance(value, list) else value for key, value in body.items()}
        await served.ok("/generate", body)
        await refused(served, keyed, "image_data: no sample of this body has the patches of media")


# --- 4: aborts, pauses, weights -------------------------------------------------------------------


async def test_aborts_end_samples_by_rid_by_prefix_and_all(checkpoints):
    async with serving(checkpoints["vl"], SlowEngine) as served:
        for abort, ended in [
            ({"rid": "q-1"}, {"q-1", "q-10"}),
            ({"rid": "q-10"}, {"q-10"}),
            ({"abort_all": True}, {"q-1", "q-10", "p"}),
            ({"rid": "z"}, set()),
        ]:
            streams = {rid: served.events(single(served, rid)) for rid in ("q-1", "q-10", "p")}
            await asyncio.gather(*map(anext, streams.values()))
            assert await served.ok("/abort_request", abort) == ""
            ends = dict(zip(streams, await asyncio.gather(*map(last, streams.values())), strict=True))
            for rid, end in ends.items():
                reason = end["meta_info"]["finish_reason"]
                assert (reason["type"] == "abort") == (rid in ended), (rid, reason)
                assert end["output_ids"] and (len(end["output_ids"]) < 40) == (rid in ended)
        await refused(served, {"rid": ""}, "rid must be", "/abort_request")
        await refused(served, {}, "rid must be", "/abort_request")


async def test_an_abort_reaches_a_sample_whose_media_are_being_decoded(checkpoints, monkeypatch):
    async with serving(checkpoints["vl"]) as served:
        requests = serve_app.requests_of
        decoding, may_end = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slowly(*args: Any, **how: Any) -> Any:
            loop.call_soon_threadsafe(decoding.set)
            asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(HANG)
            return requests(*args, **how)

        monkeypatch.setattr(serve_app, "requests_of", slowly)
        call = asyncio.create_task(served.ok("/generate", single(served, "m", stream=False)))
        await decoding.wait()
        await served.ok("/abort_request", {"rid": "m"})
        await refused(served, single(served, "m"), "in flight already")
        may_end.set()
        reply = await call
        assert reply["meta_info"]["finish_reason"]["type"] == "abort" and len(reply["output_ids"]) < 40


@pytest.mark.medium
async def test_pauses(checkpoints):
    async with serving(checkpoints["vl"], SlowEngine) as served:
        for mode in ("abort", "retract", "in_place", None):
            (whole,) = await served.in_process(served.request(max_new_tokens=40))
            stream = served.events(single(served, "before"))
            await anext(stream)
            await served.ok("/pause_generation", {} if mode is None else {"mode": mode})
            generated = served.engine.stats().tokens_generated
            new = asyncio.create_task(served.ok("/generate", single(served, "new", stream=False)))
            old = asyncio.create_task(last(stream))
            await asyncio.sleep(0.2)
            assert served.engine.stats().tokens_generated == generated and not new.done()
            assert old.done() == (mode in ("abort", None))
            await served.ok("/continue_generation", {"torch_empty_cache": True})
            assert (await new)["output_ids"] == list(whole.ids)
            event = await old
            if mode in ("abort", None):
                assert event["meta_info"]["finish_reason"]["type"] == "abort"
                assert event["output_ids"] == list(whole.ids)[: len(event["output_ids"])]
            else:
                assert event["output_ids"] == list(whole.ids)
            await refused(served, {"mode": "soon"}, "mode must be one of abort, retract, in_place", "/pause_generation")


@pytest.mark.medium
@pytest.mark.parametrize("paused", [False, True])
async def test_an_update_from_disk_reaches_a_running_sample(checkpoints, paused):
    async with serving(checkpoints["vl"], SlowEngine) as served:
        assert await checksums(served) == on_disk(checkpoints["vl"])
        (before,) = await served.in_process(served.request(max_new_tokens=40))
        stream = served.events(single(served, "r"))
        await anext(stream)
        if paused:
            await served.ok("/pause_generation", {"mode": "retract"})
        assert isinstance(served.engine, SlowEngine)
        served.engine.delay = 1.0  # a busy machine takes long to read weights
        update = {"model_path": str(checkpoints["other"]), "weight_version": "7", "flush_cache": True}
        assert (await served.ok("/update_weights_from_disk", update))["success"]
        served.engine.delay = 0.0
        if paused:
            await served.ok("/continue_generation", {})
        end = await last(stream)
        old, new = end["meta_info"]["weight_versions"]
        assert (old["version"], old["start"], new["version"], new["end"]) == ("0", 0, "7", len(end["output_ids"]))
        assert 0 < old["end"] == new["start"]
        assert end["output_ids"][: old["end"]] == list(before.ids[: old["end"]]) and end["output_ids"] != list(
            before.ids
        )
        assert end["meta_info"]["weight_version"] == "7"
        assert (await served.get("/model_info"))["weight_version"] == "7"
        assert await checksums(served) == on_disk(checkpoints["other"])


@pytest.mark.medium
async def test_weights_that_cannot_be_had_leave_the_old_ones(checkpoints, tmp_path):
    for file in checkpoints["vl"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (tmp_path / "model.safetensors").read_bytes()
    async with serving(checkpoints["vl"]) as served:
        path, before = "/update_weights_from_disk", await checksums(served)

        async def fails(folder: Any, complaint: str) -> None:
            status, reply = await served.post(path, {"model_path": str(folder), "weight_version": "3"})
            assert status == 400 and reply["success"] is False and complaint in reply["message"], reply

        await fails(checkpoints["text"], "missing")
        await fails("/no/such", "no such folder")
        await fails("a\0b", "")
        (tmp_path / "model.safetensors").write_bytes(weights[:-100])
        await fails(tmp_path, "not a whole safetensors file")
        for version in ("v1", "-1", "1.0", "01", "", 1, "٣", "9" * 40):
            await refused(served, {"model_path": str(checkpoints["other"]), "weight_version": version},
                          "weight_version must be", path)  # fmt: skip
        for folder in (None, 3, ""):
            await refused(served, {"model_path": folder}, "model_path must be", path)
        status, reply = await served.post("/weights_checker", {"action": "reset"})
        assert status == 400 and not reply["success"]
        assert await checksums(served) == before
        assert (await served.get("/model_info"))["weight_version"] == "0"


@pytest.mark.medium
async def test_an_update_without_a_version_keeps_the_version(checkpoints):
    async with serving(checkpoints["vl"], SlowEngine) as served:
        before, path = await checksums(served), "/update_weights_from_disk"
        stream = served.events(single(served, "r"))
        await anext(stream)
        await served.ok(path, {"model_path": str(checkpoints["vl"]), "weight_version": "12"})
        spans = (await last(stream))["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "12"]
        assert await checksums(served) == before
        stream = served.events(single(served, "r"))
        await anext(stream)
        await served.ok(path, {"model_path": str(checkpoints["other"]), "abort_all_requests": True})
        end = await last(stream)
        assert end["meta_info"]["finish_reason"]["type"] == "abort"
        assert await checksums(served) == on_disk(checkpoints["other"])
        assert (await served.get("/model_info"))["weight_version"] == "12"


async def test_memory_is_given_back_between_requests_only(checkpoints):
    async with serving(checkpoints["vl"], SlowEngine) as served:
        (whole,) = await served.in_process(served.request(max_new_tokens=40))
        stream = served.events(single(served, "r"))
        await anext(stream)
        await refused(served, {}, "samples are running", "/release_memory_occupation")
        await last(stream)
        await served.ok("/release_memory_occupation", {"tags": ["kv_cache"]})
        assert served.engine.cache_usage.bytes == 0
        call = asyncio.create_task(served.ok("/generate", single(served, "r", stream=False)))
        await asyncio.sleep(0.2)
        assert not call.done()
        await served.ok("/resume_memory_occupation", {"tags": ["kv_cache"]})
        assert (await call)["output_ids"] == list(whole.ids)
        assert "flushed" in await served.ok("/flush_cache")
        await served.ok("/release_memory_occupation", {})
        assert not served.engine.has_weights
        await refused(served, single(served, "r", stream=False), "has no weights")


async def test_a_client_that_leaves_ends_its_samples(checkpoints):
    async with serving(checkpoints["vl"], SlowEngine) as served:
        for stream in (True, False):
            body = served.body(served.request(n=4, max_new_tokens=40), stream=stream)
            before = served.engine.stats().tokens_generated
            call = asyncio.create_task(served.post("/generate", body))
            await until(lambda: served.engine.stats().running == 4)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: not served.engine.stats().running)
            assert served.engine.stats().tokens_generated - before < 4 * 40
            assert len(await served.ok("/generate", body | {"stream": False})) == 4  # the rids are free again


async def test_a_server_that_stops_answers_what_runs_as_aborted(checkpoints):
    async with serving(checkpoints["vl"], SlowEngine) as served:
        streams = [served.events(single(served, rid)) for rid in ("a", "b")]
        await asyncio.gather(*map(anext, streams))
        ends = asyncio.gather(*map(last, streams))
        await served.server.stop(5)
        for end in await ends:
            assert end["meta_info"]["finish_reason"]["type"] == "abort" and end["output_ids"]
        for path in ("/generate", "/abort_request"):
            assert (await served.post(path, single(served, "c")))[0] == 503
        async with served.client.get("/health") as reply:
            assert reply.status == 503


@pytest.mark.medium
async def test_what_the_server_says_of_itself(checkpoints):
    async with serving(checkpoints["text"], info={"model_path": "m", "model_type": "qwen2"}) as served:
        await served.ok("/generate", single(served, "r", stream=False))
        for path in ("/health", "/health_generate"):
            assert await served.get(path) == ""
        info = await served.get("/model_info")
        assert info == {"model_path": "m", "model_type": "qwen2", "is_generation": True,
                        "has_image_understanding": False, "weight_version": "0"}  # fmt: skip
        info = await served.get("/server_info")
        assert info["version"] == "fluxjax" and info["max_running_requests"] == 16 and info["tp_size"] == 1
        assert info["max_total_tokens"] == 16 * LONGEST and info["device"] == "cpu"
        (load,) = (await served.get("/v1/loads"))["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["max_running_requests"]) == (0, 0, 16)
        assert load["gen_throughput"] > 0
        assert (await served.get("/v1/loads"))["loads"][0]["gen_throughput"] == 0
        metrics = (await served.get("/metrics")).splitlines()
        assert {"fluxjax_serve_running 0.0", "fluxjax_serve_waiting 0.0", "fluxjax_serve_weight_version 0.0",
                "fluxjax_serve_tokens_total 40.0"} <= set(metrics)  # fmt: skip
        assert (await served.post("/nothing"))[0] == 404 and (await served.post("/health"))[0] == 405
