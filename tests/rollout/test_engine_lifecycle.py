"""Abort, pause, weights, memory and failure of the embedded engine. The rules, each tested under its number:

11. An abort ends a request, or one sample of it, keeps what was generated, frees the slots before it returns, and
    disturbs nobody else. Unknown ids are ignored. Samples beyond those that a request needs end by themselves.
12. A consumer that closes, is cancelled, or drops its stream (even unread) leaves no slot and no queue entry behind.
13. `update_weights` copies: the caller may delete its buffers. Running samples go on, later tokens carry the new
    version, and every token's log-prob is that of the full forward pass under its version's weights alone.
14. Weights of other names, shapes or dtypes are refused and change nothing.
15. Paused, nothing is generated, requests queue up, and aborts still work.
16. Asleep, the cache is gone and requests wait; sleep is refused while samples run.
17. An engine outlives its event loop. (What fails in an engine, and whom it costs: `test_failures.py`.)
18. Few shapes are compiled, and they don't depend on what the engine did before.
"""

import asyncio
import dataclasses
import gc
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_cases import (
    HANG,
    TEXT,
    VL,
    assert_logprobs,
    build,
    collect,
    engine,
    full_logits,
    full_logprobs,
    media_prompt,
    request,
    run,
    serve,
    text_prompt,
    until,
)

import models
import rollout.device
from rollout import engine_weights
from rollout.engine import EngineError, FinishReason
from sharding.mesh import make_mesh

PROMPT = text_prompt(7)


async def settled(serving):
    """A dropped stream is noticed on the loop, later; a leak hangs here."""
    await until(lambda: (serving.stats().running, serving.stats().waiting) == (0, 0))


async def at_rest(serving):
    """The engine's loop has come to its end, and would not have if there was anything that it may do."""
    await asyncio.wait([serving._task])


def params_of(model):
    return models.split(model)[1]


@pytest.mark.slow
async def test_11_abort_keeps_what_was_generated():
    model, serving = build(TEXT), engine(build(TEXT))
    (whole,) = await serve(serving, [request("whole", PROMPT, n=4, max_new_tokens=50)])
    stream = serving.generate(request("r", PROMPT, n=4, max_new_tokens=50))
    untouched = asyncio.create_task(collect(serving.generate(request("r1", PROMPT, n=2, seed=1, max_new_tokens=20)), 2))
    first = await anext(stream)
    await serving.abort("r")
    assert "r" not in serving._scheduler.jobs
    answers = await collect_after(first, stream, 4)
    for expected, answer in zip(whole, answers, strict=True):
        assert answer.finish is FinishReason.ABORT
        assert 0 < len(answer.ids) < 50
        assert answer.ids == expected.ids[: len(answer.ids)]
        assert_logprobs(model, PROMPT, answer)
    assert all(answer.finish is FinishReason.LENGTH for answer in await untouched)
    assert serving.stats().running == 0


async def collect_after(first, stream, n):
    async def chunks():
        yield first
        async for chunk in stream:
            yield chunk

    return await collect(chunks(), n)


@pytest.mark.medium
async def test_11_abort_one_sample_and_unknown_ids():
    serving = engine(build(TEXT), slots=4)
    stream = serving.generate(request("r", PROMPT, n=6, max_new_tokens=30))
    first = await anext(stream)
    await serving.pause()
    for id in ("r/1", "r/5", "r/6", "r/x", "r/", "nobody", "nobody/0", ""):  # running, waiting, and unknown ones
        await serving.abort(id)
    assert (serving.stats().running, serving.stats().waiting) == (3, 1)
    await serving.resume()
    answers = await collect_after(first, stream, 6)
    assert [i for i, a in enumerate(answers) if a.finish is FinishReason.ABORT] == [1, 5]
    assert answers[1].ids and not answers[5].ids
    await serving.abort("r")  # finished


@pytest.mark.medium
async def test_11_samples_that_are_not_needed_end_in_that_turn():
    """Not a turn later, as an abort by the consumer may: what other samples compute would depend on that."""
    serving = engine(build(TEXT))
    settings: dict[str, Any] = {"n": 8, "max_new_tokens": 40, "stop_ids": (0, 1)}
    (whole,) = await serve(serving, [request("whole", PROMPT, **settings)])
    turns = [-(-(len(answer.ids) - 1) // 3) for answer in whole]  # a token in the start, then three a round
    for need in (1, 3, 8):
        last = sorted(turns)[need - 1]
        (answers,) = await serve(serving, [dataclasses.replace(request("r", PROMPT, **settings), need=need)])
        for turn, expected, answer in zip(turns, whole, answers, strict=True):
            assert answer.ids == (expected.ids if turn <= last else expected.ids[: 1 + 3 * last])
            assert answer.finish is (expected.finish if turn <= last else FinishReason.ABORT)
    assert len(set(turns)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["aclose", "cancel", "drop", "drop unread", "error in the loop"])
async def test_12_an_abandoned_stream_leaks_nothing(how):
    serving = engine(build(TEXT), slots=4)
    ask = request("r", PROMPT, n=9, max_new_tokens=50)
    if how == "aclose":
        stream = serving.generate(ask)
        await anext(stream)
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
    elif how == "cancel":
        task = asyncio.create_task(collect(serving.generate(ask), 9))
        await until(lambda: serving.stats().tokens_generated)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "drop":
        stream = serving.generate(ask)
        await anext(stream)
        del stream
    elif how == "drop unread":
        serving.generate(ask)
    else:
        with pytest.raises(ZeroDivisionError):
            async for _ in serving.generate(ask):
                raise ZeroDivisionError
    gc.collect()
    await settled(serving)
    (answers,) = await serve(serving, [request("r", PROMPT, n=4, max_new_tokens=5)])  # the same id again
    assert all(len(answer.ids) == 5 for answer in answers)


@pytest.mark.slow
async def test_13_new_weights_in_the_middle_of_responses():
    old, new = build(VL), build(VL, seed=1)
    prompt = media_prompt(2, ("image", (1, 4, 8)), 2, seed=3)
    serving = engine(old, slots=4, version=5)
    stream = serving.generate(request("r", prompt, n=6, seed=3, max_new_tokens=24))
    first = await anext(stream)
    buffers = jax.tree.map(np.array, params_of(new))
    await serving.update_weights(6, buffers)
    jax.tree.map(lambda x: x.fill(0.0), buffers)  # host arrays are the caller's again
    assert serving.stats().version == 6
    answers = await collect_after(first, stream, 6)
    mixed = 0
    for answer in answers:
        assert len(answer.ids) == 24
        assert list(answer.versions) == sorted(answer.versions) and set(answer.versions) <= {5, 6}
        before, after = full_logprobs(old, prompt, answer.ids), full_logprobs(new, prompt, answer.ids)
        expected = np.where(np.array(answer.versions) == 5, before, after)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-5)
        assert np.abs(before - after).max() > 0.1, "the two weights should differ visibly"
        mixed += len(set(answer.versions)) == 2
    assert mixed == 4 and sum(set(answer.versions) == {6} for answer in answers) == 2


@pytest.mark.medium
async def test_13_a_paused_update_is_exact_and_greedy_follows_it():
    old, new = build(TEXT), build(TEXT, seed=1)
    serving = engine(old)
    stream = serving.generate(request("r", PROMPT, temperature=0.0, max_new_tokens=20))
    first = await anext(stream)
    await serving.pause()
    await serving.update_weights(1, params_of(new))
    await serving.update_weights(2, params_of(old))
    await serving.update_weights(3, params_of(new))
    await serving.resume()
    (answer,) = await collect_after(first, stream, 1)
    assert set(answer.versions) == {0, 3}
    logits = [full_logits(model, PROMPT, answer.ids).argmax(-1) for model in (old, new)]
    assert answer.ids == tuple(np.where(np.array(answer.versions) == 0, *logits))


@pytest.mark.medium
async def test_13_sharded_weights_arrive_whole():
    new = build(TEXT, seed=1)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)

    def cut(x):
        axes = [None] * (x.ndim - 1) + [("a", "b", "c")]
        spec = jax.sharding.PartitionSpec(*axes) if x.shape[-1] % 8 == 0 else jax.sharding.PartitionSpec()
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    serving = engine(build(TEXT))
    await serving.update_weights(1, jax.tree.map(cut, params_of(new)))
    ((answer,),) = await serve(serving, [request("r", PROMPT, max_new_tokens=8)])
    assert_logprobs(new, PROMPT, answer)


async def test_14_weights_of_another_shape_are_refused():
    serving = engine(build(TEXT))
    wrong = jax.tree.map(lambda x: x, params_of(build(TEXT)))
    for scale, complaint in (
        (np.zeros(31, np.float32), r"\(31,\).*\(32,\)"),
        (np.zeros(32, jnp.bfloat16), "dtype bfloat16.*float32"),
        ("none", "shape None"),
    ):
        wrong["norm"]["scale"] = scale
        with pytest.raises(EngineError, match=f"norm.*scale.*{complaint}"):
            await serving.update_weights(1, wrong)
    scale = wrong["norm"].pop("scale")
    with pytest.raises(EngineError, match=r"norm.*scale.* is missing"):
        await serving.update_weights(1, wrong)
    wrong["norm"]["scales"] = scale
    with pytest.raises(EngineError, match=r"norm.*scale.* is missing"):
        await serving.update_weights(1, wrong)
    wrong["norm"]["scale"] = np.zeros(32, np.float32)
    with pytest.raises(EngineError, match=r"norm.*scales.* is not among the served weights"):
        await serving.update_weights(1, wrong)
    assert serving.stats().version == 0
    ((answer,),) = await serve(serving, [request("r", PROMPT, max_new_tokens=4)])
    assert_logprobs(build(TEXT), PROMPT, answer)


async def test_15_pause():
    serving = engine(build(TEXT), slots=4)
    stream = serving.generate(request("r", PROMPT, n=4, max_new_tokens=40))
    first = await anext(stream)
    await serving.pause()
    before = serving.stats()
    assert before.running == 4
    late = serving.generate(request("late", PROMPT, n=2, max_new_tokens=4))
    await at_rest(serving)
    assert serving.stats().tokens_generated == before.tokens_generated
    assert serving.stats().waiting == 2
    await serving.abort("r/0")
    assert serving.stats().running == 3
    await serving.resume()
    answers = await collect_after(first, stream, 4)
    assert [a.finish for a in answers] == [FinishReason.ABORT] + [FinishReason.LENGTH] * 3
    assert [len(a.ids) for a in await collect(late, 2)] == [4, 4]
    assert 0 < len(answers[0].ids) < 40


@pytest.mark.medium
async def test_16_sleep_and_wake():
    serving = engine(build(TEXT))
    stream = serving.generate(request("r", PROMPT, max_new_tokens=40))
    first = await anext(stream)
    with pytest.raises(EngineError, match="1 samples are running"):
        await serving.sleep()
    (whole,) = await collect_after(first, stream, 1)
    assert len(whole.ids) == 40
    await serving.sleep()
    assert serving._device.cache is None
    late = serving.generate(request("r", PROMPT, max_new_tokens=40))
    await at_rest(serving)
    assert serving.stats().waiting == 1 and serving._device.cache is None
    await serving.wake()
    assert (await collect(late, 1))[0].ids == whole.ids


def test_17_an_engine_outlives_its_event_loop():
    serving = engine(build(TEXT))

    async def leave():
        await anext(serving.generate(request("r", PROMPT, max_new_tokens=50)))

    asyncio.run(leave())
    ((answer,),) = run(serving, request("r", PROMPT, max_new_tokens=5))
    assert_logprobs(build(TEXT), PROMPT, answer)


def test_18_shapes_are_few_and_independent_of_history():
    requests = [request(f"r{i}", text_prompt(5 + i % 8, seed=i), n=4, max_new_tokens=2 + i) for i in range(12)]
    fresh, used = engine(build(TEXT)), engine(build(TEXT))
    run(fresh, *requests)
    run(used, request("before", text_prompt(3), max_new_tokens=2, stop_ids=tuple(range(20))))
    warm_up = set(used.compiled_shapes)
    run(used, *requests)
    assert set(used.compiled_shapes) - warm_up <= set(fresh.compiled_shapes)
    programs = [program for program, _ in fresh.compiled_shapes]
    assert sorted(programs) == ["decode", "prefill", "start"]


@pytest.mark.medium
async def test_13_new_weights_take_the_place_of_the_old(monkeypatch, held_by) -> None:
    """One weight or a few small ones are on the device twice; an abstract model's engine has none until they come."""
    model, (elsewhere, here) = build(TEXT), jax.devices()[:2]
    params = jax.device_put(params_of(model), elsewhere)
    serving = engine(models.abstract(model.config), devices=[here])
    assert held_by(here) == 0
    with pytest.raises(EngineError, match="the engine has no weights: call update_weights first"):
        serving.generate(request("early", PROMPT))
    await serving.update_weights(1, params)
    served, copied, peaks = held_by(here), engine_weights._copied, []
    total, largest = (f(x.nbytes for x in jax.tree.leaves(params)) for f in (sum, max))
    assert served == total

    def watched(*args):
        copy = copied(*args)
        peaks.append(held_by(here))
        return copy

    monkeypatch.setattr(engine_weights, "_copied", watched)
    monkeypatch.setattr(engine_weights, "TOGETHER", largest)
    await serving.update_weights(2, jax.tree.map(lambda x: x * 2, params))
    assert held_by(here) == served
    assert total < max(peaks) <= total + largest
    assert 1 < len(peaks) < len(jax.tree.leaves(params))
    again = engine(models.abstract(model.config), devices=[elsewhere])
    await again.copy_weights(serving)
    assert again.stats().version == 2
    first, second = [await serve(one, [request("q", PROMPT, max_new_tokens=5)]) for one in (serving, again)]
    assert first == second
    for one in (serving, again):
        await one.close()


@pytest.mark.medium
async def test_13_arrays_that_lie_as_they_are_served_are_not_copied():
    """A learner's on one device; and they bring no sharding along for which programs would be compiled again."""
    here = jax.devices()[1]
    learners = jax.sharding.NamedSharding(make_mesh(devices=[here]), jax.sharding.PartitionSpec())
    params = jax.device_put(params_of(build(TEXT)), learners)

    def is_shared(serving) -> bool:
        tables = [tree["embedding"]["table"] for tree in (serving._device.params, params)]
        return len({table.addressable_shards[0].data.unsafe_buffer_pointer() for table in tables}) == 1

    abstract = models.abstract(TEXT)
    elsewhere, serving = (engine(abstract, devices=[device]) for device in (jax.devices()[0], here))
    half = engine(abstract, devices=[here], compute_dtype=jnp.bfloat16)
    for one in (elsewhere, half, serving):
        await one.update_weights(1, params)
    assert [is_shared(one) for one in (elsewhere, half, serving)] == [False, False, True]
    first, second = [await serve(one, [request("q", PROMPT, max_new_tokens=5)]) for one in (serving, elsewhere)]
    assert first == second
    decode: Any = serving._device.programs.decode
    compiled = decode._cache_size()
    assert await serve(serving, [request("r", PROMPT, max_new_tokens=5)]) is not None
    await serving.update_weights(2, jax.tree.map(np.asarray, params))  # which the caller may write to
    assert not is_shared(serving)
    assert await serve(serving, [request("s", PROMPT, max_new_tokens=5)]) is not None
    assert decode._cache_size() == compiled
    for one in (elsewhere, half, serving):
        await one.close()


@pytest.mark.parametrize("room", [True, False])
async def test_13_requests_wait_while_weights_are_replaced(room, monkeypatch) -> None:
    """They are served by the new ones; where these find no room, they are lost, and the engine says what it lacks."""
    serving, begun, go_on = engine(build(TEXT)), threading.Event(), threading.Event()
    split = rollout.device.split_layers

    def slowly(*args):
        begun.set()
        assert go_on.wait(HANG)
        if not room:
            raise MemoryError("no room")
        return split(*args)

    monkeypatch.setattr(rollout.device, "split_layers", slowly)
    update = asyncio.ensure_future(serving.update_weights(1, params_of(build(TEXT))))
    await asyncio.to_thread(begun.wait, HANG)
    stream = serving.generate(request("q", PROMPT, max_new_tokens=3))
    go_on.set()
    if room:
        await update
        (answer,) = await collect(stream, 1)
        assert set(answer.versions) == {1}
    else:
        with pytest.raises(MemoryError):
            await update
        with pytest.raises(EngineError, match="the engine's weights were lost: MemoryError: no room"):
            await collect(stream, 1)
        with pytest.raises(EngineError, match="the engine has no weights"):
            serving.generate(request("r", PROMPT))
    await serving.close()


@pytest.mark.medium
async def test_13_engines_take_the_same_weights_at_once(monkeypatch) -> None:
    """Weights that are spread over devices reach two engines at the same time, as when a step is published."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    fresh = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=everywhere)
    engines = [engine(build(TEXT), devices=[device]) for device in jax.devices()[:2]]
    together = threading.Barrier(2, timeout=HANG)
    check = rollout.device.check_finite
    monkeypatch.setattr(rollout.device, "check_finite", lambda *args: (together.wait(), check(*args))[1])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        for version in range(1, 40):
            params = fresh(params_of(build(TEXT)))
            await asyncio.gather(*(one.update_weights(version, params) for one in engines))
        for one in engines:
            await one.close()
    finally:
        sys.setswitchinterval(before)
